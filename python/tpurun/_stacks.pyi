def answer(signal: int, fd: int) -> None:
    """Write all stacks to ``fd`` on a signal that faulthandler is registered for (:mod:`tpurun.stacks`)."""
