"""CPU time and memory of the machine and of single processes, through psutil."""

from typing import Any, Final

import psutil

from harness.records import CpuSample

MACHINE = "machine"
# The kernel counts CPU time in ticks of 10 ms: two ticks just after a process was named would read
# as more cores than the machine has. A row spans ten ticks at least.
SHORTEST_NS: Final = 100_000_000


class CpuSampler:
    """CPU time between two calls, per process. `watch` may be called from another thread."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def watch(self, name: str, pid: int, t_ns: int) -> None:
        """Count the process's time from now on: a short load meets only one sample."""
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            self._processes.pop(name, None)
            return
        self._last[name] = (t_ns, float(times.user + times.system))
        self._processes[name] = process

    def sample(self, t_ns: int) -> list[CpuSample]:
        """A row for each process, and from the second call on for the machine. The time of a
        process that was named just now counts into its next row.
        """
        rows = self._add(t_ns, MACHINE, psutil.cpu_times(), psutil.virtual_memory().used, None)
        for name, process in list(self._processes.items()):
            try:
                memory, handles = process.memory_info().rss, process.num_fds()
                rows += self._add(t_ns, name, process.cpu_times(), memory, handles)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                self._processes.pop(name, None)
        return rows

    def _add(
        self, t_ns: int, name: str, times: Any, memory: int, handles: int | None
    ) -> list[CpuSample]:
        cpu_s = float(times.user + times.system)
        if name == MACHINE:
            cpu_s += getattr(times, "nice", 0.0)
        last_ns, last_s = self._last.setdefault(name, (t_ns, cpu_s))
        if t_ns - last_ns < SHORTEST_NS:
            return []
        self._last[name] = (t_ns, cpu_s)
        cores = max(0.0, cpu_s - last_s) / ((t_ns - last_ns) / 1e9)
        return [CpuSample(t_ns=t_ns, process=name, cores=cores, rss_bytes=memory, handles=handles)]
