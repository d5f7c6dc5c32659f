"""`hpc-grpo model export` hands a model over with its card: into a folder, and to a hub, by the hub's own client."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.config import load_config
from hpc_grpo.errors import EXIT_CONFIG, EXIT_CRASH
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.files import read_record, write_record
from hpc_grpo.run.paths import RunDir
from tests.support.command import call

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 40,
    "tokenizer.json": b"{}",
}
CONFIG = """
run: {name: sums, root: ROOT}
model: {path: Qwen/Qwen2.5-0.5B-Instruct}
data: {train: {mix: [{path: openai/gsm8k}, {path: HERE/sums.jsonl}]}}
rewards: [{name: correctness}, {name: "HERE/mine.py:shows_work", weight: 0.5}]
train: {total_steps: 20, lr: 2.0e-6}
launch: {env: {SITE: of-the-site}}
metrics: {wandb: {entity: of-the-site}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def shows_work(completions, **columns):\n    return [0.0] * len(completions)\n")
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG.replace("ROOT", str(tmp_path / "runs")).replace("HERE", str(tmp_path)))
    run = freeze(load_config(str(file)), [], [])
    evals = {0: (0.22, 0.13, 0.34), 10: (0.5, 0.4, 0.6), 20: (0.7, 0.56, 0.82), 30: (0.1, 0.0, 0.2)}
    lines = [
        {"step": step, "attempt": 1, "eval/pass@1": mean, "eval/pass@1_low": low, "eval/pass@1_high": high}
        for step, (mean, low, high) in evals.items()
    ]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.export(20).mkdir(parents=True)
    for name, content in FILES.items():
        (run.export(20) / name).write_bytes(content)
    return run


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of a hub to make a repository and to commit files, large ones by LFS."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.made: list[dict[str, Any]] = []
        self.stored: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.asked: list[str] = []
        self.refuses: dict[str, int] = {}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        self.asked.append(path)
        for end, status in self.refuses.items():
            if path.endswith(end):
                return status, {"error": "You do not have the rights for this"}
        if path == "/api/repos/create":
            self.made.append(json.loads(body))
            return 200, {"url": f"{self.url}/org/model"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path.endswith("/preupload/main"):
            files = [each["path"] for each in json.loads(body)["files"]]
            mode = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {
                        "path": name,
                        "uploadMode": mode[name.endswith(".safetensors")],
                        "shouldIgnore": False,
                        "oid": None,
                    }
                    for name in files
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.startswith("/lfs/"):
            self.stored[path.removeprefix("/lfs/")] = body
            return 200, {}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.commits.append(value["summary"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.stored[value["oid"]]
                else:
                    self.files[value["path"]] = base64.b64decode(value["content"])
            return 200, {"commitUrl": f"{self.url}/org/model/commit/abc", "commitOid": "abc"}
        return 404, {"error": f"no {path}"}


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        is_allowed = self.path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        status, content = self.server.answer(self.path, body) if is_allowed else (401, {"error": "who are you"})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        """Write no line for each request."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push(run: RunDir, url: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Export in a process of its own: huggingface_hub reads its variables at import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(run.path / "hf")}
    return subprocess.run(
        [sys.executable, "-m", "hpc_grpo.cli", "model", "export", str(run.path), *words],
        env={**kept, **own, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_push_makes_a_private_repository_with_the_model_and_a_card_of_the_run(run: RunDir, hub: Hub) -> None:
    done = push(run, hub.url, "--push-to-hub", "org/model")
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/org/model\n"), done.stderr
    [made] = hub.made
    assert (made["name"], made["organization"], made.get("visibility", made.get("private"))) in (
        ("model", "org", "private"),
        ("model", "org", True),
    ), "as this version of the client asks for it"
    assert {name: hub.files[name] for name in FILES} == FILES
    assert hashlib.sha256(FILES["model.safetensors"]).hexdigest() in hub.stored, "the weights went by LFS"
    assert hub.files.keys() - FILES.keys() == {"README.md", "hpc_grpo.yaml"}
    assert hub.commits == ["Step 20 of sums"]
    sent = b"".join(hub.files.values()).decode("latin-1")
    assert TOKEN not in sent + done.stderr
    assert push(run, hub.url, "--push-to-hub", "org/model", "--public").returncode == 0
    assert hub.made[1].get("visibility", hub.made[1].get("private")) in ("public", False)


def test_a_card_says_what_was_trained_how_well_and_how_to_do_it_again(run: RunDir, tmp_path: Path) -> None:
    done = call("model", "export", str(run.path), "--out", str(tmp_path / "given"))
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'given'}\n")
    assert {name: (tmp_path / "given" / name).read_bytes() for name in FILES} == FILES
    assert not any((tmp_path / "given" / name).samefile(run.export(20) / name) for name in FILES)
    card = (tmp_path / "given" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1]) == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hpc-grpo", "grpo"],
    }
    lines = card.splitlines()
    assert "# given" in lines
    assert "| metric | before training | after step 20 |" in lines
    assert "| pass@1 | 0.220 [0.130, 0.340] | 0.700 [0.560, 0.820] |" in lines
    assert "| data | `openai/gsm8k`, `sums.jsonl` |" in lines
    assert "| rewards | `correctness`, `mine.py:shows_work` (weight 0.5) |" in lines
    assert "hpc-grpo train hpc_grpo.yaml" in lines
    again = tmp_path / "given" / "hpc_grpo.yaml"
    assert "of-the-site" not in again.read_text() + card
    assert str(tmp_path) not in again.read_text() + card
    assert load_config(str(again)).train.lr == 2e-6


def test_a_card_shows_no_address_and_no_path_of_the_site(run: RunDir, tmp_path: Path) -> None:
    values = yaml.safe_load((tmp_path / "my.yaml").read_text())
    judge = {
        "url": "http://judge01.site:8200/v1",
        "model": "Qwen/Qwen3-8B",
        "template": "Is {completion} of /a/b right?",
    }
    remote = {"url": "http://10.0.0.7:9000", "path": "/api/score", "health_path": "/ready"}
    mine = {
        "command": f"TMPDIR={tmp_path}/tmp python {tmp_path}/grade.py --fast",
        "base": "https://hooks.site/x",
        "odd": "yes / no",
    }
    values["rewards"] = [
        {"name": "llm_judge", "args": judge},
        {"name": "remote", "args": remote},
        {"name": f"{tmp_path}/mine.py:shows_work", "args": mine},
    ]
    values["data"]["system_prompt"] = "/no_think"
    values["run"]["name"] = "judged"
    (tmp_path / "judged.yaml").write_text(yaml.safe_dump(values))
    judged = freeze(load_config(str(tmp_path / "judged.yaml")), [], [])
    run.export(20).rename(judged.path / "model")
    judged.exports.mkdir()
    (judged.path / "model").rename(judged.export(20))
    given = tmp_path / "given"
    assert call("model", "export", str(judged.path), "--step", "20", "--out", str(given)).exit_code == 0
    card, again = (given / "README.md").read_text(), (given / "hpc_grpo.yaml").read_text()
    for shown in ("site", "10.0.0.7", "8200", str(tmp_path)):
        assert shown not in card + again
    assert "| rewards | `llm_judge`, `remote`, `mine.py:shows_work` |" in card
    assert "addresses of your own servers in place of `https://left-out.invalid/v1`" in card
    (given / "mine.py").write_text((tmp_path / "mine.py").read_text())
    published = load_config(str(given / "hpc_grpo.yaml"))
    nobody = "https://left-out.invalid/v1"
    assert [reward.args for reward in published.rewards] == [
        judge | {"url": nobody},
        remote | {"url": nobody},
        {"command": "TMPDIR=tmp python grade.py --fast", "base": nobody, "odd": "yes / no"},
    ]
    assert published.data.system_prompt == "/no_think"


def test_a_card_of_a_fork_gives_no_command_that_would_do_something_else(run: RunDir, tmp_path: Path) -> None:
    source = read_record(run.source, dict)
    assert source is not None
    write_record(run.source, {**source, "forked_from": {"run": "/site/other", "step": 10}})
    assert call("model", "export", str(run.path), "--step", "20", "--out", str(tmp_path / "given")).exit_code == 0
    card = (tmp_path / "given" / "README.md").read_text()
    assert "The run is a fork of another run at step 10. `hpc_grpo.yaml` is its config since then." in card
    assert "hpc-grpo train" not in card
    assert "/site" not in card


def test_the_adapter_of_a_run_has_peft_as_its_library_and_a_run_without_evals_says_so(
    run: RunDir, tmp_path: Path
) -> None:
    (run.export(20) / "adapter_config.json").write_text("{}")
    run.metrics.unlink()
    assert call("model", "export", str(run.path), "--step", "20", "--out", str(tmp_path / "given")).exit_code == 0
    card = (tmp_path / "given" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "The run had no eval." in card


@pytest.mark.parametrize(
    ("words", "environ", "refused", "code", "says"),
    [
        (["--push-to-hub", "model"], {}, {}, EXIT_CONFIG, "--push-to-hub = model: must be ORG/NAME"),
        (["--push-to-hub", "org/a b"], {}, {}, EXIT_CONFIG, "--push-to-hub = org/a b: Repo id must use alphanumeric"),
        (["--push-to-hub", "org/model"], {"HF_TOKEN": ""}, {}, EXIT_CONFIG, "there is no token. Run `hf auth login`"),
        (["--push-to-hub", "org/model"], {"HF_TOKEN": "hf_wrong"}, {}, EXIT_CONFIG, "refuses the token"),
        (["--push-to-hub", "org/model"], {"HF_HUB_OFFLINE": "1"}, {}, EXIT_CONFIG, "HF_HUB_OFFLINE keeps this process"),
        (["--push-to-hub", "org/model"], {}, {"/commit/main": 403}, EXIT_CONFIG, "refuses the token (HfHubHTTPError"),
        (["--push-to-hub", "org/model"], {}, {"/preupload/main": 400}, EXIT_CRASH, "did not take the model"),
        (["--push-to-hub", "org/model"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, {}, EXIT_CRASH, "ConnectError"),
        (["--public"], {}, {}, EXIT_CONFIG, "--public needs --push-to-hub"),
        (["--out", "."], {}, {}, EXIT_CONFIG, "--out = .: the folder must be new or empty."),
    ],
)
def test_what_a_hub_or_a_folder_cannot_take_is_an_error_with_what_to_do(
    run: RunDir, hub: Hub, words: list[str], environ: dict[str, str], refused: dict[str, int], code: int, says: str
) -> None:
    hub.refuses = refused
    done = push(run, hub.url, *words, **environ)
    assert says in done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stderr + done.stdout
    assert hub.files == {}
