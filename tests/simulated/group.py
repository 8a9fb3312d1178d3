"""A process group for tensors of the simulated devices alone, as NCCL is: gloo moves what it is given."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

NAME = "simulated"


def register():
    """Makes the group known to `init_process_group("simulated")`."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, Group, devices=["cuda"])


class Done(dist.Work):
    """What a collective returns: everything runs in order, so it is over."""

    def __init__(self, result):
        super().__init__()
        self.of, self.future = result, torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def result(self):
        return self.of

    def get_future(self):
        return self.future


def _on_host(tensors):
    for tensor in tensors:
        if not tensor.is_cuda:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    return [_memory(tensor) for tensor in tensors]


def _memory(tensor):
    """A copy on the host, which is no copy of the program's."""
    return torch.ops.simulated.host_copy(tensor.detach())


def _put(tensors, values):
    for tensor, value in zip(tensors, values, strict=True):
        torch.ops.simulated.put(tensor.detach(), value)


class Group(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.timeout = store, timeout
        self.collectives = []  # the names of those that were called, as torch's operators have them
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)

    def allreduce(self, tensors, options=None):
        self.collectives.append("allreduce_")
        values, given = _on_host(tensors), dist.AllreduceOptions()
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        is_mean = operation == dist.ReduceOp.AVG
        given.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        self.gloo.allreduce(values, given).wait()
        _put(tensors, [value / self.size() for value in values] if is_mean else values)
        return Done(tensors)

    def allgather(self, outputs, tensors, options=None):
        self.collectives.append("allgather_")
        values, of_all = _on_host(tensors), [_on_host(output) for output in outputs]
        self.gloo.allgather(of_all, values).wait()
        for output, row in zip(outputs, of_all, strict=True):
            _put(output, row)
        return Done(outputs)

    def broadcast(self, tensors, options):
        self.collectives.append("broadcast_")
        values = _on_host(tensors)
        self.gloo.broadcast(values, options).wait()
        _put(tensors, values)
        return Done(tensors)

    def barrier(self, options=None):
        return self.gloo.barrier()

    def name(self):
        return NAME

    getBackendName = name

    @property
    def group_name(self):
        return f"{NAME}:{id(self)}"

    def get_group_store(self):
        return self.store

    @property
    def _device_types(self):
        return [torch.device("cuda")]

    def _get_backend(self, device):
        assert device.type == "cuda"
        return SimpleNamespace(options=SimpleNamespace(_timeout=self.timeout))

    def _get_sequence_number_for_group(self):
        return len(self.collectives)
