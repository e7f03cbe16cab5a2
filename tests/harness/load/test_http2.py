"""HTTP/2: what a server must begin with."""

import pytest
from h2.exceptions import ProtocolError

from harness.load.http2 import check_first_frame

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize("said", [b"HTTP/1.1 404 Not Found\r\n\r\n", b"HTTP/1.0 400 Bad", b"nope"])
def test_a_server_of_another_protocol_is_known_by_its_first_bytes(said: bytes) -> None:
    with pytest.raises(ProtocolError, match=said.split(b"\r\n")[0].decode()):
        check_first_frame(said)


@pytest.mark.parametrize("received", [b"", SETTINGS[:3], SETTINGS[:4], SETTINGS * 2])
def test_a_server_that_begins_with_settings_speaks_http2(received: bytes) -> None:
    check_first_frame(received)
