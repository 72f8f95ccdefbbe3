-- The platform's own step after collection, and the indexes that a long history needs.

-- `pending`, `done` or `failed`; NULL where no such step was asked for.
ALTER TABLE attempts ADD COLUMN post_process TEXT;
ALTER TABLE attempts ADD COLUMN post_process_tries INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN post_process_message TEXT;
-- When it was last marked, by the database's clock.
ALTER TABLE attempts ADD COLUMN post_process_ms INTEGER;

-- Listings go from the newest back.
CREATE INDEX attempts_created ON attempts (created_ms, id);
-- Recovery and listings by state; nearly every row is in a final state that few ask for.
CREATE INDEX attempts_state ON attempts (state, created_ms);
CREATE INDEX attempts_post_process ON attempts (post_process, created_ms) WHERE post_process IN ('pending', 'failed');
-- Garbage collection and verification walk the hashes of one artifact store in order.
CREATE INDEX outputs_blake3 ON outputs (artifact_store, blake3);
CREATE INDEX logs_blake3 ON logs (artifact_store, blake3) WHERE blake3 IS NOT NULL;

-- SQLite cannot replace a view.
DROP VIEW analyses_v1;
DROP VIEW attempts_v1;

CREATE VIEW attempts_v1 AS
SELECT
    a.id,
    a.attempt,
    a.state,
    a.reason,
    a.message,
    a.superseded,
    a.host,
    a.submitter,
    CASE WHEN a.created_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.created_ms / 1000.0, 'unixepoch') END AS created_at,
    CASE WHEN a.started_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.started_ms / 1000.0, 'unixepoch') END AS started_at,
    CASE WHEN a.ended_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.ended_ms / 1000.0, 'unixepoch') END AS ended_at,
    CASE WHEN a.committed_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.committed_ms / 1000.0, 'unixepoch') END AS committed_at,
    a.wall_ms,
    a.cpu_ms,
    a.memory_peak_bytes,
    a.pids_peak,
    a.disk_bytes,
    a.files,
    a.oom_kills,
    a.exit_code,
    a.signal,
    a.isolation_level,
    a.isolation,
    a.limits,
    a.hints,
    a.notices,
    a.provenance,
    a.complete,
    a.outputs_count,
    a.output_bytes,
    a.refused_count,
    a.result,
    a.result_note,
    a.post_process,
    a.post_process_tries,
    a.post_process_message,
    CASE WHEN a.post_process_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.post_process_ms / 1000.0, 'unixepoch') END AS post_process_at
FROM attempts a;

CREATE VIEW analyses_v1 AS
SELECT v.*
FROM attempts_v1 v
WHERE NOT v.superseded
    AND NOT EXISTS (
        SELECT 1 FROM attempts b WHERE b.id = v.id AND b.attempt > v.attempt AND NOT b.superseded
    );
