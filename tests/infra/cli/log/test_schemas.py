"""`trivium schemas`: registered, checked and listed."""

import json

from schemas.codec import full_schema
from streams.log.registry import Registry, subjects
from tests.infra.cli.trivium_runner import trivium_here
from tests.streams.log.registry_stub import running_registry


def test_schemas_command_registers_lists_and_checks() -> None:
    with running_registry() as stub:
        code, output, _ = trivium_here("schemas", "register", "--url", stub.url)
        assert code == 0 and f"{len(subjects())} subjects" in output
        assert trivium_here("schemas", "list", "--check", "--url", stub.url)[0] == 0
        code, output, _ = trivium_here("schemas", "list", "--url", stub.url, "--json")
        rows = {row["subject"]: row for row in json.loads(output)}
        assert rows.keys() == subjects().keys()
        assert all(row["version"] == 1 and row["schema_id"] for row in rows.values())
        assert rows["prompts-value"]["record"] == "Prompt"

        narrow_schema = {**full_schema("Usage"), "fields": [{"name": "sum", "type": "long"}]}
        Registry(stub.url).register("dev.usage-value", narrow_schema)
        env = {"TRIVIUM_LOG_TOPIC_PREFIX": "dev."}
        code, _, errors = trivium_here("schemas", "list", "--check", "--url", stub.url, env=env)
        assert code == 2 and "dev.usage-value: the current version cannot read version 1" in errors
        code, output, _ = trivium_here(
            "schemas", "list", "--check", "--url", stub.url, "--json", env=env
        )
        assert code == 1 and len(json.loads(output)["breaks"]) == 1


def test_schemas_command_without_registry_uses_no_network() -> None:
    code, output, _ = trivium_here("schemas", "list", "--check")
    assert (code, output) == (0, "every version of every record can be read\n")
    code, output, _ = trivium_here("schemas", "list", "--json")
    assert code == 0 and all(row["version"] is None for row in json.loads(output))
    code, _, errors = trivium_here("schemas", "register")
    assert code == 2 and "expected --url or log.schema_registry, found neither" in errors
