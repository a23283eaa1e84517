"""Running out of memory, on a device or in the machine: how to tell, what to let go, how to say it."""

import gc

import torch

from rebuild.states.captured import SampleError

# What torch and CUDA say where they raise a plain RuntimeError.
SIGNS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class TooLarge(SampleError):
    """A sample, of `length` tokens, does not fit into memory."""

    length = 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def free_memory() -> None:
    """Give back what nothing refers to any more; of use only when the error and its frames are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def too_large(position: int, length: int, error: BaseException) -> TooLarge:
    """Return the error for a sample that does not fit even alone."""
    stop = TooLarge(
        f"a sample of {length} tokens does not fit into memory, even in a forward of its own",
        expected=f"room for the states of {length} tokens beside the model's weights",
        seen=str(error).strip().partition("\n")[0],
        remedy="set hidden_states.max_length below this, give the job more devices to spread the model over, or end "
        "what else is on the device; samples already written are kept",
    )
    stop.position, stop.length = position, length
    return stop
