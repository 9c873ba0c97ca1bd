-- `usage` where the deployment has a schema registry (log.schema_registry): ${registry}.
-- Without one its records are Avro with a fingerprint in front, which no format of Flink reads:
-- `avro` expects bare records.
CREATE TABLE `usage` (
  `number` BIGINT,
  request_id STRING,
  session_id STRING,
  tenant STRING,
  model STRING,
  prompt_tokens INT,
  cached_tokens INT,
  completion_tokens INT,
  worker_ms DOUBLE
) WITH (
  'connector' = 'kafka',
  'topic' = '${prefix}usage',
  'properties.bootstrap.servers' = '${bootstrap}',
  'properties.isolation.level' = 'read_committed',
  'format' = 'avro-confluent',
  'avro-confluent.url' = '${registry}',
  'scan.startup.mode' = 'earliest-offset',
  'scan.bounded.mode' = 'latest-offset'
);
