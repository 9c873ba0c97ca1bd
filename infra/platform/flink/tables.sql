-- Trivium's topics as tables. ${bootstrap} and ${prefix} are put in by whoever runs this.
CREATE TABLE prompts (
  id STRING,
  `text` STRING,
  max_tokens INT
) WITH (
  'connector' = 'kafka',
  'topic' = '${prefix}prompts',
  'properties.bootstrap.servers' = '${bootstrap}',
  'key.format' = 'raw',
  'key.fields' = 'id',
  'value.format' = 'json',
  'value.json.encode.ignore-null-fields' = 'true',
  'value.fields-include' = 'EXCEPT_KEY',
  'scan.startup.mode' = 'earliest-offset'
);

-- The bridge commits answers and its position together, so only committed records are read.
CREATE TABLE answers (
  id STRING,
  prompt_partition INT,
  prompt_offset BIGINT,
  `text` STRING,
  finish_reason STRING,
  model STRING,
  prompt_tokens INT,
  completion_tokens INT,
  asked_ms BIGINT,
  ended_ms BIGINT,
  error_code STRING,
  error_message STRING,
  error_retriable BOOLEAN
) WITH (
  'connector' = 'kafka',
  'topic' = '${prefix}answers',
  'properties.bootstrap.servers' = '${bootstrap}',
  'properties.isolation.level' = 'read_committed',
  'key.format' = 'raw',
  'key.fields' = 'id',
  'value.format' = 'json',
  'value.fields-include' = 'EXCEPT_KEY',
  'scan.startup.mode' = 'earliest-offset'
);
