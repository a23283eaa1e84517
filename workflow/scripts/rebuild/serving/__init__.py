"""SGLang servers and the devices that they run on."""
