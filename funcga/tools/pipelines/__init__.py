"""Accumulation over the stages of a pipeline of torch.distributed.pipelining, whose schedules are
accumulators.

    gradient = torch_backend.pipeline_value_and_grad(ScheduleGPipe, stage, F.cross_entropy)
    loss, grads = funcga.accumulate(gradient, n=4)(x, y)

`in_torch.py` makes the gradient function, `window_in_torch.py` has it and its windows, and
`schedule_in_torch.py` a schedule for any micro-batches. It stands on the engine's buffers, on the
reduction over replicas and on what drives wrapped modules; nothing stands on it. Only torch needs
this tool: in JAX stages are axes of a mesh in one program.

Design note: docs/concepts/inside_pipelines.md.
"""
