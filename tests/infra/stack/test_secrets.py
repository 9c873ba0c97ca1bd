"""What a deployment leaves on disk and in messages, for its owner alone."""

import os
import sys
from pathlib import Path

import pytest

from infra.broker.node import Broker
from infra.processes.supervisor import ProcessSpec, Supervisor
from infra.stack.configuration import Settings, dump, load, secrets_environ
from infra.stack.plan import StackPlan, process_specs
from infra.stack.statefile import StackFiles
from schemas.errors import ConfigError
from schemas.state_folder import private_folder
from tests.infra.broker.test_node import QUICK
from tests.waiting import until

SECRETS = ("hunter2", "key-one", "key-two", "registry-pass")
FILE = """
[log]
sasl_username = "me"
sasl_password = "hunter2"
schema_registry = "http://me:registry-pass@registry:8081"
[gateway]
api_keys = ["key-one", "key-two"]
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "trivium.toml"
    file.write_text(FILE)
    return load(file, environ={})


def exposed(folder: Path) -> list[str]:
    """Whatever another user could read."""
    found = [folder, *folder.rglob("*")]
    return [f"{path}: {path.stat().st_mode:o}" for path in found if path.stat().st_mode & 0o077]


def test_secrets_are_neither_written_nor_shown(settings: Settings, tmp_path: Path) -> None:
    """Processes get them by their environment."""
    written, shown = dump(settings), repr(settings)
    assert not [each for each in SECRETS if each in written or each in shown]
    specs = process_specs(
        StackPlan(),
        folder=tmp_path,
        config=tmp_path / "stack.toml",
        engine="sim",
        gateway_port=0,
        secrets=secrets_environ(settings),
    )
    (tmp_path / "stack.toml").write_text(written)
    assert not [each for spec in specs for each in SECRETS if each in " ".join(spec.command)]
    for spec in specs:
        names = {name: value for name, value in spec.env.items() if name.startswith("TRIVIUM_")}
        own = load(tmp_path / "stack.toml", environ=names)
        assert own.log == settings.log
        is_asked = spec.name.startswith("gateway")
        assert own.gateway.api_keys == (settings.gateway.api_keys if is_asked else ())


def test_secrets_can_be_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    (tmp_path / "keys").write_text("key-one\n\nkey-two\n")
    (tmp_path / "trivium.toml").write_text(f"[log]\nsasl_password_file = '{tmp_path}/password'\n")
    environ = {"TRIVIUM_GATEWAY_API_KEYS_FILE": f"{tmp_path}/keys"}
    found = load(tmp_path / "trivium.toml", environ=environ)
    assert found.log.sasl_password == "hunter2"
    assert found.gateway.api_keys == ("key-one", "key-two")
    assert load(environ={"TRIVIUM_LOG_SASL_PASSWORD": "x"}).log.sasl_password == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[log]\nsasl_password_file = '/absent'", "expected a file with the secret: .*No such"),
        ("[log]\nsasl_password_file = '/dev/null'", "expected one line, found 0 in /dev/null"),
        ("[log]\nbootstrap_file = 'x'", "log.bootstrap_file: unknown"),
        ("[log]\nsasl_password = 12345", "sasl_password: expected a valid string, found something"),
        ("[gateway]\napi_keys = ['a,b']", "gateway.api_keys: expected keys without"),
    ],
)
def test_messages_about_secrets_do_not_quote_them(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trivium.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "trivium.toml", environ={})
    assert "12345" not in str(caught.value)
    assert "a,b" not in str(caught.value)


async def test_what_processes_write_is_private_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    before = os.umask(0o022)
    supervisor, files = Supervisor(), StackFiles(tmp_path / "home")
    try:
        files.lock()
        code = f"open({str(tmp_path / 'home' / 'written')!r}, 'w').close()"
        process = supervisor.start(
            ProcessSpec(
                name="one",
                command=(sys.executable, "-c", code),
                log_file=tmp_path / "home" / "logs" / "one.log",
                restart=False,
            )
        )
        await until(lambda: process.failed)
        assert (tmp_path / "home" / "written").stat().st_mode & 0o077 == 0
        assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "home" / "logs").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        files.release()
        await supervisor.stop()


def test_a_folder_that_everybody_writes_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="expected a folder of our own, found one that others"):
        private_folder(tmp_path)


def test_the_brokers_data_are_private(tmp_path: Path, bootstrap: str) -> None:
    broker = Broker(QUICK, tmp_path / "broker", tethered=True)
    before = os.umask(0o022)
    try:
        broker.start()
        assert exposed(broker.folder / "data") == []
        assert broker.folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        broker.reset()
