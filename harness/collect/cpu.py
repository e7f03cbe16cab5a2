"""CPU and memory of the machine and of the run's processes, through psutil."""

from typing import NamedTuple

import psutil

from harness.records import CpuSample

MACHINE = "machine"


class _Used(NamedTuple):
    cpu_s: float
    rss_bytes: int
    handles: int | None


class CpuSampler:
    """CPU time between two calls, per process. `watch` may be called from another thread."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def watch(self, name: str, pid: int) -> None:
        """Begin to sample a process, if it exists."""
        try:
            self._processes[name] = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._processes.pop(name, None)

    def sample(self, t_ns: int) -> list[CpuSample]:
        """A row for the machine and for each process that existed at the last call too."""
        memory_bytes = int(psutil.virtual_memory().used)
        used: dict[str, _Used] = {MACHINE: _Used(_machine_cpu_s(), memory_bytes, None)}
        for name, process in list(self._processes.items()):
            try:
                times = process.cpu_times()
                used[name] = _Used(
                    times.user + times.system, int(process.memory_info().rss), process.num_fds()
                )
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                self._processes.pop(name, None)
        rows = []
        for name, (cpu_s, rss_bytes, handles) in used.items():
            last = self._last.get(name)
            if last is not None and t_ns > last[0]:
                cores = max(0.0, cpu_s - last[1]) / ((t_ns - last[0]) / 1e9)
                rows.append(
                    CpuSample(
                        t_ns=t_ns, process=name, cores=cores, rss_bytes=rss_bytes, handles=handles
                    )
                )
            self._last[name] = (t_ns, cpu_s)
        return rows


def _machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))
