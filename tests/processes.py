"""Replicas for tests: processes that are started once, joined by gloo, and run functions of the test modules.

They are forked from a process that has imported what all of them need and has run nothing of it.
"""

import atexit
import datetime
import gc
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from pathlib import Path

TIMEOUT = datetime.timedelta(seconds=60)


class Failed(AssertionError):
    """What went wrong on each rank: `errors` has a (type, text) or None for each."""

    def __init__(self, errors, traces):
        super().__init__("\n".join(f"rank {rank}:\n{trace}" for rank, trace in enumerate(traces) if trace))
        self.errors = errors


def answer(function, *args, **options):
    """("nothing", what the call returns), or of the error that it raises (the name of its class, its text)."""
    try:
        return "nothing", function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def share_one_device():
    """Every group of gloo in this process is served by one thread. Each would have one, which wakes up 100 times a second."""
    import torch.distributed as dist

    gloo = dist.ProcessGroupGloo
    create, device = gloo.__init__, gloo.create_default_device()

    def on_that_device(self, store, rank, size, timeout, **_):  # what newer versions say beside it is torch's default
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        create(self, store, rank, size, options)

    gloo.__init__ = on_that_device


def _serve(pipe, rank, world, port, backend):
    import torch
    import torch.distributed as dist

    from tests import simulated

    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork is never searched for cycles, which would copy its memory
    gc.set_threshold(100_000)  # nor is the rest at every other call
    if backend == "simulated":
        simulated.install()
    if backend != "gloo":
        torch.cuda.set_device(rank)
    share_one_device()
    store = dist.TCPStore("localhost", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    groups = {size: dist.new_group(range(size), timeout=TIMEOUT) for size in range(1, world + 1)}
    pipe.send(("ready", None))
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            break
        if call is None:
            break
        number, function, size, args = call
        # Ranks that were left out of a call have made fewer groups than others. torch names a group by its number, which
        # all of its ranks have to agree on, so each call has numbers of its own.
        dist.distributed_c10d._world.group_count = 1000 * number
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                pipe.send(("done", function(groups[size], *args)))
        except BaseException as error:
            pipe.send(("failed", (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


def _context():
    context = multiprocessing.get_context("forkserver")
    # the last is what every optimizer imports when it is made, in 2 seconds
    context.set_forkserver_preload(["tests.kits", "torch.distributed.fsdp", "torch._dynamo"])
    return context


class Processes:
    """`world` processes; `run(function, *args)` calls function(group, *args) in each of the first `size`."""

    def __init__(self, world, backend="gloo"):
        self.world, self.backend, self.workers, self.store, self.calls = world, backend, [], None, 0

    def start(self):
        import torch.distributed as dist

        context = _context()
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world, self.store.port, self.backend), daemon=True
            )
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        for _, pipe in self.workers:
            assert pipe.poll(120)
            assert pipe.recv() == ("ready", None)

    def run(self, function, *args, size=None, each=None, limit=120):
        """What the function returns on every rank; `each` has a last argument for each. Raises Failed."""
        if not self.workers:
            self.start()
        size = self.world if size is None else size
        self.calls += 1
        for rank, (_, pipe) in enumerate(self.workers[:size]):
            pipe.send((self.calls, function, size, (*args, each[rank]) if each is not None else args))
        until, replies = time.monotonic() + limit, []
        for _, pipe in self.workers[:size]:
            try:
                replies.append(pipe.recv() if pipe.poll(max(0, until - time.monotonic())) else ("hung", None))
            except (EOFError, ConnectionResetError):
                replies.append(("died", None))
        if any(kind in ("hung", "died") for kind, _ in replies):
            self.stop()
        if any(kind != "done" for kind, _ in replies):
            errors = [None if k == "done" else (k, "") if value is None else value[:2] for k, value in replies]
            raise Failed(errors, [value[2] if k == "failed" else None if k == "done" else k for k, value in replies])
        return [value for _, value in replies]

    def stop(self):
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers, self.store = [], None


_POOLS = {}


def processes(world=4, backend="gloo"):
    """The processes that all tests share."""
    if (world, backend) not in _POOLS:
        pool = _POOLS[world, backend] = Processes(world, backend)
        atexit.register(pool.stop)
    return _POOLS[world, backend]


def launched(function, *args, count, limit=120):
    """What is printed by so many processes that call the function as torchrun would start it, with its variables."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(count)]
        started = [
            _context().Process(target=_launch, args=(file, rank, count, port, function, args))
            for rank, file in enumerate(files)
        ]
        for process in started:
            process.start()
        until = time.monotonic() + limit
        try:
            for process in started:
                process.join(max(0, until - time.monotonic()))
            codes = [process.exitcode for process in started]
        finally:
            for process in started:
                process.kill()
        printed = "".join(file.read_text() for file in files if file.exists())
        assert codes == [0] * count, printed
        return printed


def _launch(file, rank, world, port, function, args):
    output = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    gc.freeze()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    function(*args)
