"""What connectors are told: Debezium's PostgreSQL source, its JDBC sink, and a sink into a file.

Pure; the reasons for the less usual settings stand with them, and in infra/platform/README.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Config = Mapping[str, str]
_JSON = "org.apache.kafka.connect.json.JsonConverter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Where a connector finds its tables, and as whom."""

    host: str
    port: int
    name: str
    user: str
    password: str = ""


def keys_with_schemas(connector: Config) -> Config:
    """Its keys carry their schema: the key of a prompt is that of its answer, and the JDBC sink
    finds a row only by a key with one."""
    return {**connector, "key.converter": _JSON, "key.converter.schemas.enable": "true"}


def avro(connector: Config, registry: str) -> Config:
    """Its keys and values are Avro in Confluent's framing, by schemas that it registers; `registry`
    is the URL of Apicurio's own API."""
    config = dict(connector)
    for name in ("key.converter", "value.converter"):
        config[name] = "io.apicurio.registry.utils.converter.AvroConverter"
        settings = {
            "url": registry,
            "as-confluent": "true",
            "use-id": "contentId",  # four bytes, the same id that Confluent's clients see
            "headers.enabled": "false",  # else the id is there, and not before the value
            "auto-register": "true",
            "find-latest": "true",
        }
        config |= {f"{name}.apicurio.registry.{key}": value for key, value in settings.items()}
    return config


def source(
    database: Database, table: str, *, publication: str, slot: str, partitions: int, prefix: str
) -> Config:
    """Changes of one table, on the topic `PREFIX.TABLE`."""
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "database.hostname": database.host,
        "database.port": str(database.port),
        "database.user": database.user,
        "database.password": database.password,
        "database.dbname": database.name,
        "topic.prefix": slot,  # of each connector another, or they wait 110 s for their metrics
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
        # A deleted row is one record without a value; by default it would be the text `null`.
        "transforms.unwrap.delete.tombstone.handling.mode": "delete-to-tombstone",
        "transforms.unwrap.add.headers": "op,source.lsn,source.ts_ms",
        "transforms.route.type": "org.apache.kafka.connect.transforms.RegexRouter",
        "transforms.route.regex": rf"{slot}\.public\.(.*)",
        "transforms.route.replacement": f"{prefix}.$1",
    }


def sink(
    database: Database, topic: str, *, table: str, columns: dict[str, str], insert: str = "update"
) -> Config:
    """Answers into the columns of a table, by its key; `columns` are fields of answers and the
    columns that they fill. Keys and values carry their schemas."""
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
        "consumer.override.isolation.level": "read_committed",  # of bridges, that write so
        "consumer.override.auto.offset.reset": "earliest",
        "transforms": "columns",
        "transforms.columns.type": "org.apache.kafka.connect.transforms.ReplaceField$Value",
        "transforms.columns.include": ",".join(columns),
        "transforms.columns.renames": ",".join(f"{a}:{b}" for a, b in columns.items()),
    }


def file_sink(topics: Sequence[str], file: str, *, schemas: bool) -> Config:
    """Records into a file, a line each, as Connect's JSON converter reads them."""
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
