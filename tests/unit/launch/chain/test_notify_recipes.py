"""The programs of the recipe that tells a user how a run ended, as a job runs them, against servers on loopback."""

from __future__ import annotations

import re
import socketserver
import sys
import threading
from collections.abc import Iterator
from email import message_from_bytes
from email.policy import default
from pathlib import Path

import pytest

from hpc_grpo.launch.chain.decide import News
from hpc_grpo.launch.chain.link import notify
from hpc_grpo.run.paths import RunDir
from tests.support.stand_in_server import Serve

RECIPES = Path(__file__).resolve().parents[4] / "docs" / "recipes.md"
WHY = "Lost 1 node(s): n2 <!channel> & more.\nThe next job carries on."


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The folder that the run was started in, with the recipe's programs."""
    for name, text in re.findall(r"^```python\n# (tell_\w+\.py)\n(.*?)^```$", RECIPES.read_text(), re.M | re.S):
        (tmp_path / name).write_text(text)
    return tmp_path


class MailServer(socketserver.ThreadingTCPServer):
    """Takes mail by SMTP (RFC 5321), as a relay of a cluster does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _MailHandler)
        self.mails: list[tuple[str, str, bytes]] = []


class _MailHandler(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self.wfile.write(b"220 relay\r\n")
        sender = receiver = ""
        while line := self.rfile.readline():
            word = line[:4].upper()
            if word == b"MAIL":
                sender = line.decode().split("<")[1].split(">")[0]
            elif word == b"RCPT":
                receiver = line.decode().split("<")[1].split(">")[0]
            elif word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = list(iter(self.rfile.readline, b".\r\n"))
                self.server.mails.append((sender, receiver, b"".join(lines)))
            elif word == b"QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            self.wfile.write(b"250 relay\r\n")


@pytest.fixture
def mail_server() -> Iterator[MailServer]:
    server = MailServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("event", ["complete", "ended", "retrying"])
def test_slack_is_told_how_a_run_ended(
    event: str, programs: Path, run: RunDir, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda path, body: (200, "ok"))
    monkeypatch.setenv("SLACK_WEBHOOK_URL", f"{server.url}/services/T0/B0/xyz")
    notify([sys.executable, "tell_slack.py"], run, News(event, WHY))  # type: ignore[arg-type]
    [(path, body, _)] = server.requests
    assert path == "/services/T0/B0/xyz"
    assert body == {
        "text": f"run: {event}. Lost 1 node(s): n2 &lt;!channel&gt; &amp; more.\nThe next job carries on."
    }, "a text of the run addresses nobody"


def test_a_mail_says_how_a_run_ended(
    programs: Path, run: RunDir, mail_server: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAIL_TO", "ann@example.org")
    monkeypatch.setenv("SMTP_SERVER", f"127.0.0.1:{mail_server.server_address[1]}")
    notify([sys.executable, "tell_mail.py"], run, News("ended", WHY))
    [(sender, receiver, content)] = mail_server.mails
    mail = message_from_bytes(content, policy=default)
    assert (sender, receiver, mail["Subject"]) == ("ann@example.org", "ann@example.org", "run: ended")
    assert mail.get_content().splitlines() == [*WHY.splitlines(), "", f"hpc-grpo status --why {run.path}"]


@pytest.mark.parametrize(
    ("program", "variables", "says"),
    [
        ("tell_slack.py", {"SLACK_WEBHOOK_URL": "{url}/services/s3cret"}, "HTTP Error 404"),
        ("tell_slack.py", {}, "KeyError: 'SLACK_WEBHOOK_URL'"),
        ("tell_mail.py", {"MAIL_TO": "ann@example.org", "SMTP_SERVER": "127.0.0.1:9"}, "Connection refused"),
    ],
)
def test_a_server_that_refuses_is_reported_and_costs_nothing(
    program: str,
    variables: dict[str, str],
    says: str,
    programs: Path,
    run: RunDir,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = serve(lambda path, body: (404, "no_service"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(url=server.url))
    notify([sys.executable, program], run, News("complete", "The run is complete."))
    printed = capsys.readouterr().out
    assert "launch.notify could not tell that the run is complete: " in printed
    assert says in printed
    assert "s3cret" not in printed
