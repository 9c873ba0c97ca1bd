"""`trivium schemas`: registered, checked and listed."""

import json

from schemas.codec import full_schema
from schemas.log.registry import Registry, subjects
from tests.infra.cli.running import trivium_here
from tests.schemas.log.registry_stub import running_registry


def test_register_list_and_check_against_a_registry() -> None:
    with running_registry() as stub:
        code, shown, _ = trivium_here("schemas", "register", "--url", stub.url)
        assert code == 0 and f"{len(subjects())} subjects" in shown
        assert trivium_here("schemas", "check", "--url", stub.url)[0] == 0
        code, shown, _ = trivium_here("schemas", "list", "--url", stub.url, "--json")
        rows = {row["subject"]: row for row in json.loads(shown)}
        assert rows.keys() == subjects().keys()
        assert all(row["version"] == 1 and row["schema_id"] for row in rows.values())
        assert rows["prompts-value"]["record"] == "Prompt"

        other = {**full_schema("Usage"), "fields": [{"name": "sum", "type": "long"}]}
        Registry(stub.url).register("dev.usage-value", other)
        env = {"TRIVIUM_LOG_TOPIC_PREFIX": "dev."}
        code, _, errors = trivium_here("schemas", "check", "--url", stub.url, env=env)
        assert code == 2 and "dev.usage-value: the current version cannot read version 1" in errors
        code, shown, _ = trivium_here("schemas", "check", "--url", stub.url, "--json", env=env)
        assert code == 1 and len(json.loads(shown)["breaks"]) == 1


def test_without_a_registry_nobody_is_asked() -> None:
    code, shown, _ = trivium_here("schemas", "check")
    assert (code, shown) == (0, "every version of every record can be read\n")
    code, shown, _ = trivium_here("schemas", "list", "--json")
    assert code == 0 and all(row["version"] is None for row in json.loads(shown))
    code, _, errors = trivium_here("schemas", "register")
    assert code == 2 and "expected --url or log.schema_registry, found neither" in errors
