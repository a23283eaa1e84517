/* A small libnvidia-ml.so.1 for machines without a GPU: it lets the real nvidia-ml-py run its real code.
 *
 *     cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 stub_nvml.c
 *     LD_LIBRARY_PATH=. STUB_NVML_COUNT=4 python ...
 *
 * STUB_NVML_COUNT      how many GPUs there are (4)
 * STUB_NVML_INIT       what nvmlInit returns (0; 9 = driver not loaded, 18 = library and driver differ)
 * STUB_NVML_FORBIDDEN  the number of a GPU that may not be opened, as in a container (none)
 *
 * Only what this project asks for is here. GPU i has UUID GPU-0000000i-0000-0000-0000-000000000000.
 */
#include <stdio.h>
#include <stdlib.h>

typedef int status;
typedef long handle; /* a GPU's number plus one */
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NO_PERMISSION = 4, DRIVER_NOT_LOADED = 9, MISMATCH = 18 };

typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int gpu, memory; } utilization;

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int count(void) { return setting("STUB_NVML_COUNT", 4); }

status nvmlInitWithFlags(unsigned int flags) { (void)flags; return setting("STUB_NVML_INIT", SUCCESS); }
status nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
status nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(status code) {
    switch (code) {
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case MISMATCH: return "Driver/library version mismatch";
    case NO_PERMISSION: return "Insufficient Permissions";
    default: return "stub error";
    }
}

status nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    snprintf(text, size, "580.00.stub");
    return SUCCESS;
}

status nvmlDeviceGetCount_v2(unsigned int *number) {
    *number = count();
    return SUCCESS;
}

status nvmlDeviceGetHandleByIndex_v2(unsigned int index, handle *device) {
    if ((int)index >= count()) return INVALID_ARGUMENT;
    if ((int)index == setting("STUB_NVML_FORBIDDEN", -1)) return NO_PERMISSION;
    *device = (handle)index + 1;
    return SUCCESS;
}

status nvmlDeviceGetIndex(handle device, unsigned int *index) {
    *index = device - 1;
    return SUCCESS;
}

status nvmlDeviceGetName(handle device, char *text, unsigned int size) {
    (void)device;
    snprintf(text, size, "Stub GPU");
    return SUCCESS;
}

status nvmlDeviceGetUUID(handle device, char *text, unsigned int size) {
    snprintf(text, size, "GPU-%08ld-0000-0000-0000-000000000000", device - 1);
    return SUCCESS;
}

status nvmlDeviceGetMemoryInfo(handle device, memory *info) {
    info->total = 141ULL << 30;
    info->used = (unsigned long long)device << 30;
    info->free = info->total - info->used;
    return SUCCESS;
}

status nvmlDeviceGetUtilizationRates(handle device, utilization *rates) {
    rates->gpu = 10 * (unsigned int)device;
    rates->memory = 5;
    return SUCCESS;
}

status nvmlDeviceGetTemperature(handle device, int sensor, unsigned int *celsius) {
    (void)sensor;
    *celsius = 40 + (unsigned int)device;
    return SUCCESS;
}

status nvmlDeviceGetPowerUsage(handle device, unsigned int *milliwatts) {
    (void)device;
    *milliwatts = 300000;
    return SUCCESS;
}
