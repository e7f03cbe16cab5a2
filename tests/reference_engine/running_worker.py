"""A worker process without its frontend: we start it, say Hello and send frames, good and bad."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from reference_engine.config import EngineConfig, StepCost
from reference_engine.faults import Faults
from reference_engine.protocol import (
    FrameReader,
    FromWorker,
    Hello,
    Output,
    StepReport,
    ToWorker,
    WorkerSettings,
    encode_frame,
)

SECRET = "open sesame"
HELLO = encode_frame(Hello(secret=SECRET))
NUM_BLOCKS = 256
QUICK = EngineConfig(
    runner="simulated", num_blocks=NUM_BLOCKS, step_cost=StepCost(fixed_s=0.001), max_num_seqs=4
)


class RunningWorker:
    """Its standard input is ours: closing it ends the worker."""

    def __init__(self, config: EngineConfig = QUICK) -> None:
        settings = WorkerSettings(config=config, faults=Faults(), secret=SECRET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reference_engine.worker.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.process.stdin.flush()
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def next_complaint(self) -> str:
        """The next line on its standard error; waits for it."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().decode()

    def end(self) -> tuple[int, str]:
        """Its exit status, and what it had left to say."""
        _, complaints = self.process.communicate(timeout=20)
        return self.process.returncode, complaints.decode()


class Line:
    """A connection to a worker, as the frontend has one."""

    def __init__(self, address: tuple[str, int], *, first: bytes = HELLO) -> None:
        self.socket = socket.create_connection(address, timeout=30)
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder[FromWorker](FromWorker)
        self._read: list[bytes] = []
        self.socket.sendall(first)

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def send(self, *messages: ToWorker) -> None:
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def next(self) -> FromWorker:
        while not self._read:
            data = self.socket.recv(65536)
            assert data, "the worker has ended the connection"
            self._read = self._reader.feed(data)
        message: FromWorker = self._decoder.decode(self._read.pop(0))
        return message

    def report(self) -> StepReport:
        report = self.next()
        assert isinstance(report, StepReport), report
        return report

    def last_output_of(self, request_id: str) -> tuple[Output, StepReport]:
        while True:
            report = self.report()
            for output in report.outputs:
                if output.request_id == request_id and output.ending is not None:
                    return output, report

    def is_ended_by_the_worker(self) -> bool:
        """Read to the end, which comes: the socket's timeout fails the test otherwise."""
        with suppress(ConnectionResetError):
            while self.socket.recv(65536):
                pass
        return True


@contextmanager
def running_worker(config: EngineConfig = QUICK) -> Iterator[RunningWorker]:
    """A worker that a test has to leave alive and with nothing more to say."""
    worker = RunningWorker(config)
    try:
        yield worker
    finally:
        ended = worker.end()
    assert ended == (0, "")


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload
