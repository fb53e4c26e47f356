"""A stand-in for an SGLang server, for tests of the programs that ask one: its HTTP answers, no model.

Every request takes rounds of `COMMIT` tokens if the server speculates and of one token if not, all
requests of a batch in step. FAKE_SGLANG in the environment makes it misbehave: `refuse-sampling`, `die`
(at the second batch of more than one request), or `slow` (a second a round).
"""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from sglang_ddtree_patch.launch.server_process import RunningServer

COMMIT = 4
ROUND_SECONDS = 0.002

_SCRIPT = """
import http.server, json, os, sys, time

flags = sys.argv[1:]
value = lambda name, default: flags[flags.index(name) + 1] if name in flags else default
algorithm = value("--speculative-algorithm", None)
commit = COMMIT if algorithm else 1
mode = os.environ.get("FAKE_SGLANG", "")
pause = 1.0 if mode == "slow" else ROUND_SECONDS
batches = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.reply(200, {
            "attention_backend": value("--attention-backend", "stock"),
            "decode_attention_backend": None,
            "page_size": int(value("--page-size", 1)),
        })

    def do_POST(self):
        global batches
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = request["sampling_params"]
        if mode == "refuse-sampling" and sampling["temperature"] and algorithm == "DDTREE":
            return self.reply(400, {"error": {"message": "sampling is not served"}})
        count = len(request["input_ids"])
        batches += count > 1
        if mode == "die" and batches == 2:
            print("out of memory", flush=True)
            os._exit(1)
        self.send_response(200)
        self.end_headers()
        tokens, rounds = 1, 0
        while True:
            done = tokens >= sampling["max_new_tokens"]
            for index in range(count):
                self.event(index, min(tokens, sampling["max_new_tokens"]), rounds, done)
            if done:
                return
            time.sleep(pause)
            tokens, rounds = tokens + commit, rounds + 1

    def event(self, index, tokens, rounds, done):
        meta = {"completion_tokens": tokens, "finish_reason": {"type": "length"} if done else None}
        if done and algorithm and rounds:
            meta |= {"spec_verify_ct": rounds, "spec_num_correct_drafts": rounds * (commit - 1)}
        event = {"index": index, "meta_info": meta}
        self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
        self.wfile.flush()

http.server.HTTPServer(("127.0.0.1", int(value("--port", 0))), Handler).serve_forever()
"""


class FakeTemplate:
    """Takes the place of ServerTemplate; remembers the flags of each server it started."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, environment=None):
        pass

    def __enter__(self) -> "FakeTemplate":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def launch(self, arguments, environment, log_path: Path) -> RunningServer:
        self.started.append(list(arguments))
        script = f"COMMIT, ROUND_SECONDS = {COMMIT}, {ROUND_SECONDS}\n{_SCRIPT}"
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return RunningServer(process.pid, process)
