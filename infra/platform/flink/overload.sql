-- Rows come five times as fast as they are answered. One part of them goes through the topics, and
-- waits there; another calls the OpenAI endpoint, which slows its source down.
SET 'parallelism.default' = '1';
SET 'execution.checkpointing.interval' = '5s';
SET 'restart-strategy.type' = 'fixed-delay';
SET 'restart-strategy.fixed-delay.attempts' = '1000';
SET 'restart-strategy.fixed-delay.delay' = '1s';

CREATE TABLE tickets (
  id BIGINT
) WITH (
  'connector' = 'datagen',
  'rows-per-second' = '${rate}',
  'fields.id.kind' = 'sequence',
  'fields.id.start' = '1',
  'fields.id.end' = '${tickets}'
);

CREATE TABLE calls (
  id BIGINT
) WITH (
  'connector' = 'datagen',
  'rows-per-second' = '${rate}',
  'fields.id.kind' = 'sequence',
  'fields.id.start' = '1',
  'fields.id.end' = '${calls}'
);

CREATE TABLE answered (
  id STRING,
  answer STRING,
  error STRING
) WITH (
  'connector' = 'kafka',
  'topic' = '${answered}',
  'properties.bootstrap.servers' = '${bootstrap}',
  'format' = 'json'
);

CREATE TABLE predicted (
  id STRING,
  answer STRING
) WITH (
  'connector' = 'kafka',
  'topic' = '${predicted}',
  'properties.bootstrap.servers' = '${bootstrap}',
  'format' = 'json'
);

CREATE VIEW questions AS
SELECT CAST(id AS STRING) AS id, CONCAT('Sort ticket ', CAST(id AS STRING)) AS `text` FROM calls;

CREATE MODEL trivium INPUT (`text` STRING) OUTPUT (answer STRING) WITH (
  'provider' = 'openai',
  'endpoint' = '${gateway}/v1/chat/completions',
  'api-key' = 'none',
  'model' = '${model}',
  'max-tokens' = '${max_tokens}'
);

EXECUTE STATEMENT SET BEGIN
INSERT INTO prompts
SELECT CAST(id AS STRING), CONCAT('Sort ticket ', CAST(id AS STRING)), ${max_tokens} FROM tickets;
INSERT INTO answered
SELECT id, `text`, error_code FROM answers;
INSERT INTO predicted
SELECT id, answer FROM ML_PREDICT(
  TABLE questions, MODEL trivium, DESCRIPTOR(`text`),
  MAP['async', 'true', 'max-concurrent-operations', '${concurrent}', 'timeout', '180s',
      'output-mode', 'allow_unordered']);
END;
