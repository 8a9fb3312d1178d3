"""What `torch.cuda` has in Python, for the simulated devices: its own functions need a build with CUDA."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

COUNT = 2

library = None
default_generators = ()
sync_debug_mode = 0


def replace(loaded):
    """Puts the functions of this file into torch.cuda; `loaded` is the library of device.cpp."""
    global library, default_generators
    library = loaded
    default_generators = tuple(torch.ops.simulated.default_generator(index) for index in range(COUNT))
    here = globals()
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        for name in REPLACED:
            if hasattr(module, name):
                setattr(module, name, here[name])
    for module in (torch.accelerator, torch.accelerator.memory):
        module.get_memory_info, module.memory_allocated = mem_get_info, memory_allocated
        module.memory_reserved = memory_reserved
    torch.Tensor.record_stream = lambda tensor, stream: None


def index_of(device=None):
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def wait(name):
    if not library.simulated_wait(name.encode()):
        raise RuntimeError(f"called a synchronizing CUDA operation: {name}")


# --- devices


def _lazy_init():
    pass


def is_available():
    return True


def is_initialized():
    return True


def _is_in_bad_fork():
    return False


def device_count():
    return COUNT


def current_device():
    return library.simulated_device()


def set_device(device):
    library.simulated_set_device(index_of(device))


def _exchange_device(index):
    return library.simulated_set_device(index)


def _maybe_exchange_device(index):  # torch.compile tells the two apart
    return _exchange_device(index)


class device:
    def __init__(self, device):
        self.index = index_of(device)

    def __enter__(self):
        self.before = _exchange_device(self.index)

    def __exit__(self, *error):
        _exchange_device(self.before)


def get_device_name(device=None):
    return "simulated"


def get_device_capability(device=None):
    return (9, 0)


def get_device_properties(device=None):
    total = library.simulated_limit(index_of(device))
    return SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=total, multi_processor_count=1, gcnArchName=""
    )


def is_current_stream_capturing():
    return False


def synchronize(device=None):
    wait("torch.cuda.synchronize")


def set_sync_debug_mode(mode):
    global sync_debug_mode
    sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
    library.simulated_may_wait(sync_debug_mode != 2)


def get_sync_debug_mode():
    return sync_debug_mode


# --- memory


def memory_allocated(device=None):
    return library.simulated_live(index_of(device))


def max_memory_allocated(device=None):
    return library.simulated_peak(index_of(device))


def memory_reserved(device=None):
    return memory_allocated(device)


def reset_peak_memory_stats(device=None):
    library.simulated_reset_peak(index_of(device))


def mem_get_info(device=None):
    total = library.simulated_limit(index_of(device))
    return total - memory_allocated(device), total


def empty_cache():
    pass


# --- generators


def get_rng_state(device="cuda"):
    return default_generators[index_of(device)].get_state()


def set_rng_state(state, device="cuda"):
    default_generators[index_of(device)].set_state(state)


def get_rng_state_all():
    return [get_rng_state(index) for index in range(COUNT)]


def set_rng_state_all(states):
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed):
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(int(seed))


def initial_seed():
    return default_generators[current_device()].initial_seed()


# --- streams, of which there is one


class Event:
    def __init__(self, *args, **options):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        wait("Event.synchronize")


class Stream:
    stream_id = cuda_stream = 0

    def __init__(self, device=None, priority=0, **options):
        self.device = torch.device("cuda", index_of(device))

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def query(self):
        return True

    def synchronize(self):
        wait("Stream.synchronize")


default_stream = current_stream = Stream


@contextmanager
def stream(stream):
    yield


REPLACED = (
    "_lazy_init", "is_available", "is_initialized", "_is_in_bad_fork", "device_count", "current_device", "set_device",
    "_exchange_device", "_maybe_exchange_device", "device", "get_device_name", "get_device_capability",
    "get_device_properties", "is_current_stream_capturing", "synchronize", "set_sync_debug_mode",
    "get_sync_debug_mode", "memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats",
    "mem_get_info", "empty_cache", "default_generators", "get_rng_state", "set_rng_state", "get_rng_state_all",
    "set_rng_state_all", "manual_seed", "manual_seed_all", "initial_seed", "Event", "Stream", "default_stream",
    "current_stream", "stream",
)  # fmt: skip


def addmm(total, left, right, out_dtype, *, beta=1, alpha=1, out):
    """What CUDA has and the host does not: a product of 16-bit matrices that is added in float32."""
    product = left.to(out_dtype) @ right.to(out_dtype)
    return out.copy_(beta * total.to(out_dtype) + alpha * product)


def add_operators():
    """Lasts as long as the library that is returned."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    return library
