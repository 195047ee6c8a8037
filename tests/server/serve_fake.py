"""A server process over a fake engine that pauses after two tokens until SIGUSR1. Prints its address.

SIGUSR2: the engine ends, as when a rank was lost.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes import FakeEngine

from moesaic import log
from moesaic.server.app import create_app
from moesaic.server.run import bind, run, url_of
from moesaic.server.settings import ServerSettings
from moesaic.text.tokenizer import Tokenizer


def main(folder: str, drain_timeout_s: float) -> None:
    log.configure(style="json")
    tokenizer = Tokenizer.load(folder)
    engine = FakeEngine(vocab=tokenizer.vocab_size, pause_after=2)
    signal.signal(signal.SIGUSR1, lambda *_: engine.gate.set())
    signal.signal(signal.SIGUSR2, lambda *_: setattr(engine, "is_ready", False))
    settings = ServerSettings(model_name="tiny", drain_timeout_s=drain_timeout_s)
    with bind("127.0.0.1", 0) as sock:
        print(url_of(sock), flush=True)
        run(create_app(engine, tokenizer, settings), engine, sock, settings)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
