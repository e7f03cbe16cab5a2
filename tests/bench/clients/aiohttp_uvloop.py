"""aiohttp, its answers read by line, on uvloop."""

import uvloop

from tests.bench.clients.aiohttp_lines import main

if __name__ == "__main__":
    uvloop.run(main())
