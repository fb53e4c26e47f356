"""A stand-in for an SGLang server, for tests of the programs that ask one: its HTTP answers, no model.

Every request takes rounds of `COMMIT` tokens if the server speculates and of one token if not, all
requests of a batch in step. Token ids are answered without text; text is answered with what the repeated
sentence at its end goes on with, four characters a token.

FAKE_SGLANG in the environment, a list of words, makes it misbehave:

    refuse-sampling       HTTP 400 for sampled requests to DDTREE
    die                   ends at the second batch of more than one request
    die-at=N              ends in the middle of the Nth request's answer
    fail-at=N             HTTP 500 from the Nth request on
    fail-info             HTTP 500 for /server_info
    slow                  a second a round
    hard                  text that repeats nothing is committed token by token
    long=N, long-commit=M prompts of more than N tokens are committed M tokens at a time
    stray                 goes on with other words than the sentence
    metrics               /metrics is there
    old                   /get_server_info alone, as releases before 0.5.10 have it
    no-text               started with --skip-tokenizer-init
    embeds, loading       an embedding model; HTTP 503 for everything
    key=K                 wants the API key K
    uncounted             counts rounds alone, not drafts
    cuda                  says that it runs on a GPU
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from sglang_ddtree_patch.launch.server_process import RunningServer, ServerProcess, launch_python

COMMIT = 4
ROUND_SECONDS = 0.002

_SCRIPT = """
import http.server, json, os, sys, time

flags = sys.argv[1:]
value = lambda name, default: flags[flags.index(name) + 1] if name in flags else default
algorithm = value("--speculative-algorithm", None)
mode = dict(word.partition("=")[::2] for word in os.environ.get("FAKE_SGLANG", "").split())
pause = 1.0 if "slow" in mode else ROUND_SECONDS
limit = int(value("--context-length", 40960))
served = {"requests": 0, "batches": 0, "rounds": 0, "tokens": 0}

def prompt_of(request):
    return len(request["text"]) // 4 if "text" in request else len(request["input_ids"][0])

def continuation(text):
    # What follows if the end of the text goes on as after its last occurrence.
    end = text[-40:]
    before = text.rfind(end, 0, len(text) - 1)
    repeats = before >= 0 and "stray" not in mode
    return (text[before + len(end):] * 200 if repeats else "something else entirely " * 200), before >= 0

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

    def is_turned_away(self):
        if "loading" in mode:
            self.reply(503, "")
            return True
        if "key" in mode and self.headers["Authorization"] != "Bearer " + mode["key"]:
            self.reply(401, {"error": {"message": "Unauthorized"}})
            return True
        return False

    def do_GET(self):
        if self.path == "/health_generate":
            return self.reply(200, {})
        if self.is_turned_away():
            return
        if self.path == "/metrics" and "metrics" in mode:
            return self.reply(200, "# HELP sglang:spec_verify_calls_total of all requests\\n" + "".join(
                f'{name}{{model_name="m"}} {count}\\n' for name, count in {
                    "sglang:num_running_reqs": 0.0, "sglang:num_requests_total": served["requests"],
                    "sglang:spec_verify_calls_total": served["rounds"],
                    "sglang:generation_tokens_total": served["tokens"],
                    "sglang:ddtree_nodes_sum": 7.5 * served["rounds"],
                    "sglang:ddtree_nodes_count": served["rounds"],
                }.items()))
        if self.path != ("/get_server_info" if "old" in mode else "/server_info"):
            return self.reply(404, {"detail": "Not Found"})
        if "fail-info" in mode:
            return self.reply(500, {"error": {"message": "out of luck"}})
        self.reply(200, {
            "model_path": value("--model-path", "m"), "version": "0.0",
            "device": "cuda" if "cuda" in mode else "cpu",
            "attention_backend": value("--attention-backend", "stock"),
            "decode_attention_backend": None,
            "page_size": int(value("--page-size", 1)),
            "tp_size": 1, "dtype": value("--dtype", "auto"), "kv_cache_dtype": "auto",
            "context_length": limit, "max_total_num_tokens": 1 << 20, "max_req_input_len": limit - 6,
            "skip_tokenizer_init": "no-text" in mode, "is_embedding": "embeds" in mode,
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": value("--speculative-draft-model-path", None),
            "speculative_num_draft_tokens": 16 if algorithm else None,
        })

    def do_POST(self):
        if self.is_turned_away():
            return
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = request["sampling_params"]
        if "refuse-sampling" in mode and sampling["temperature"] and algorithm == "DDTREE":
            return self.reply(400, {"error": {"message": "sampling is not served"}})
        prompt = prompt_of(request)
        if prompt + sampling["max_new_tokens"] > limit:
            return self.reply(400, {"error": {"message": f"longer than {limit} tokens"}})
        count = 1 if "text" in request else len(request["input_ids"])
        served["requests"] += 1
        served["batches"] += count > 1
        if served["requests"] >= int(mode.get("fail-at", 1 << 30)):
            return self.reply(500, {"error": {"message": "out of luck"}})
        if "die" in mode and served["batches"] == 2:
            print("out of memory", flush=True)
            os._exit(1)
        self.send_response(200)
        self.end_headers()
        text, repeats = continuation(request.get("text", ""))
        commit = COMMIT if algorithm else 1
        if "hard" in mode and not repeats:
            commit = 1
        if prompt > int(mode.get("long", 1 << 30)):
            commit = int(mode["long-commit"])
        tokens, rounds = 1, 0
        while True:
            done = tokens >= sampling["max_new_tokens"]
            for index in range(count):
                said = min(tokens, sampling["max_new_tokens"])
                self.event(index, prompt, said, rounds, commit, done, text[: 4 * said])
            if done:
                served["rounds"] += rounds
                served["tokens"] += count * sampling["max_new_tokens"]
                return
            if served["requests"] == int(mode.get("die-at", 0)):
                self.wfile.write(b'data: {"index": 0, "me')
                print("killed", flush=True)
                self.wfile.flush()
                os._exit(1)
            time.sleep(pause)
            tokens, rounds = tokens + commit, rounds + 1

    def event(self, index, prompt, tokens, rounds, commit, done, text):
        meta = {
            "completion_tokens": tokens, "prompt_tokens": prompt, "cached_tokens": 0,
            "finish_reason": {"type": "length"} if done else None,
        }
        if done and algorithm and rounds:
            meta |= {
                "spec_verify_ct": rounds, "spec_num_correct_drafts": rounds * (commit - 1),
                "spec_num_proposed_drafts": rounds * 15,
            }
        if "uncounted" in mode:
            meta.pop("spec_num_correct_drafts", None)
        event = {"index": index, "text": text, "meta_info": meta}
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
        return launch_python(arguments, environment, log_path, program=("-c", script))


@contextmanager
def fake_server(flags: Sequence[str] = (), mode: str = "") -> Iterator[ServerProcess]:
    """A fake that somebody else started, as the probes find it."""
    environment = {"FAKE_SGLANG": mode}
    with ServerProcess(flags, environment=environment, launcher=FakeTemplate().launch, grace=0) as server:
        yield server
