"""Makes the configurations of connectors: Debezium's PostgreSQL source, its JDBC sink, a file sink.

Free of I/O; comments and infra/platform/README.md give the reasons for the less usual settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Config = Mapping[str, str]
_JSON = "org.apache.kafka.connect.json.JsonConverter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """The database of a connector's tables, and its user."""

    host: str
    port: int
    name: str
    user: str
    password: str = ""


def keys_with_schemas(connector: Config) -> Config:
    """Return the connector with schemas in its keys.

    An answer has the key of its prompt, and the JDBC sink finds a row only by a key with a schema.
    """
    return {**connector, "key.converter": _JSON, "key.converter.schemas.enable": "true"}


def avro(connector: Config, registry: str) -> Config:
    """Return the connector with keys and values as Avro in Confluent's framing.

    It registers their schemas; `registry` is the URL of Apicurio's own API.
    """
    config = dict(connector)
    for name in ("key.converter", "value.converter"):
        config[name] = "io.apicurio.registry.utils.converter.AvroConverter"
        settings = {
            "url": registry,
            "as-confluent": "true",
            "use-id": "contentId",  # four bytes, the id that Confluent's clients use
            "headers.enabled": "false",  # else the id is in a header, not before the value
            "auto-register": "true",
            "find-latest": "true",
        }
        config |= {f"{name}.apicurio.registry.{key}": value for key, value in settings.items()}
    return config


def source(
    database: Database, table: str, *, publication: str, slot: str, partitions: int, prefix: str
) -> Config:
    """Return a source that writes the changes of one table to the topic `PREFIX.TABLE`."""
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "database.hostname": database.host,
        "database.port": str(database.port),
        "database.user": database.user,
        "database.password": database.password,
        "database.dbname": database.name,
        "topic.prefix": slot,  # unique, or connectors wait 110 s to register their metrics
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "table.include.list": f"public.{table}",
        "snapshot.mode": "initial",
        "poll.interval.ms": "10",  # by default a change waits for half a second
        "decimal.handling.mode": "double",  # else numbers come as bytes
        "topic.creation.default.replication.factor": "1",
        "topic.creation.default.partitions": str(partitions),
        "transforms": "unwrap,route",
        "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
        # A deleted row becomes one record without a value; by default it would be the text `null`.
        "transforms.unwrap.delete.tombstone.handling.mode": "delete-to-tombstone",
        "transforms.unwrap.add.headers": "op,source.lsn,source.ts_ms",
        "transforms.route.type": "org.apache.kafka.connect.transforms.RegexRouter",
        "transforms.route.regex": rf"{slot}\.public\.(.*)",
        "transforms.route.replacement": f"{prefix}.$1",
    }


def sink(
    database: Database, topic: str, *, table: str, columns: dict[str, str], insert: str = "update"
) -> Config:
    """Return a sink that writes answers into the columns of a table, by its key.

    `columns` maps fields of answers to columns. Keys and values carry their schemas.
    """
    return {
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "tasks.max": "1",
        "topics": topic,
        "connection.url": f"jdbc:postgresql://{database.host}:{database.port}/{database.name}",
        "connection.username": database.user,
        "connection.password": database.password,
        "insert.mode": insert,
        "primary.key.mode": "record_key",
        "delete.enabled": "false",
        "schema.evolution": "none",
        "collection.name.format": table,
        "key.converter": _JSON,
        "key.converter.schemas.enable": "true",
        "value.converter": _JSON,
        "value.converter.schemas.enable": "true",
        "consumer.override.isolation.level": "read_committed",  # bridges write in transactions
        "consumer.override.auto.offset.reset": "earliest",
        "transforms": "columns",
        "transforms.columns.type": "org.apache.kafka.connect.transforms.ReplaceField$Value",
        "transforms.columns.include": ",".join(columns),
        "transforms.columns.renames": ",".join(f"{a}:{b}" for a, b in columns.items()),
    }


def file_sink(topics: Sequence[str], file: str, *, schemas: bool) -> Config:
    """Return a sink that writes a file, a line per record as Connect's JSON converter reads it."""
    with_schemas = str(schemas).lower()
    return {
        "connector.class": "org.apache.kafka.connect.file.FileStreamSinkConnector",
        "tasks.max": "1",
        "topics": ",".join(topics),
        "file": file,
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": _JSON,
        "value.converter.schemas.enable": with_schemas,
        "consumer.override.isolation.level": "read_committed",
        "consumer.override.auto.offset.reset": "earliest",
    }
