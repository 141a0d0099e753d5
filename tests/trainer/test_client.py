"""Pins what the trainer says when the orchestrator refuses or is gone: a sentence with the URL."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stretto.trainer.client import Orchestrator, OrchestratorError


@pytest.fixture
def nobody():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_nobody_answers(nobody):
    started = time.monotonic()
    with pytest.raises(OrchestratorError, match=nobody):
        Orchestrator(nobody, patience=0.3).batch(0)
    assert 0.3 <= time.monotonic() - started < 5


def test_a_stop_ends_the_patience(nobody):
    with pytest.raises(OrchestratorError, match="has not answered"):
        Orchestrator(nobody, patience=60, give_up=lambda: True).trained(3)


def test_a_refusal_is_passed_on():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(409)
            self.end_headers()
            self.wfile.write(b"batch 5 cannot be cut before batch 4")

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(OrchestratorError, match="409.*batch 5 cannot be cut before batch 4"):
            Orchestrator(f"http://127.0.0.1:{server.server_port}").batch(5)
        thread.join()
