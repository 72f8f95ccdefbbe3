-- The queue: analyses that wait, who takes them, and what became of them.

-- Until when the runner answers for the attempt, by the database's clock; NULL for those of `fumehood run`.
ALTER TABLE attempts ADD COLUMN lease_ms BIGINT CHECK (lease_ms BETWEEN 0 AND 4503599627370496);
-- When somebody first wanted it cancelled, and who.
ALTER TABLE attempts ADD COLUMN cancel_ms BIGINT;
ALTER TABLE attempts ADD COLUMN cancel_by TEXT;
-- How often it may still be tried again; NULL: it did not come from the queue.
ALTER TABLE attempts ADD COLUMN retries_left BIGINT CHECK (retries_left BETWEEN 0 AND 4294967295);
-- The name of the worker that took it.
ALTER TABLE attempts ADD COLUMN worker TEXT;

-- Expired leases and wishes to cancel are looked for among the attempts that run, by the index that is there: a lease
-- changes every few seconds, and an index of its own would have to change with it.

-- What was asked for. What hangs on an analysis goes with it, also when an older Fumehood removes it, which does not
-- know these tables: hence the cascades.
CREATE TABLE submissions (
    id TEXT COLLATE "C" PRIMARY KEY,
    -- Whoever submits with the same key again is told of this one.
    submit_key TEXT UNIQUE,
    fingerprint TEXT NOT NULL,
    -- JSON as it was sent, byte by byte; may hold secrets, so no view shows it.
    request TEXT NOT NULL,
    submitter TEXT NOT NULL,
    priority BIGINT NOT NULL CHECK (priority BETWEEN 0 AND 4294967295),
    retries BIGINT NOT NULL CHECK (retries BETWEEN 0 AND 4294967295),
    -- States, divided by commas.
    retry_on TEXT NOT NULL,
    memory_bytes BIGINT CHECK (memory_bytes >= 0),
    cpu_milli BIGINT CHECK (cpu_milli >= 0),
    created_ms BIGINT NOT NULL,
    FOREIGN KEY (id) REFERENCES analyses (id) ON DELETE CASCADE
);

-- Files that were submitted, each once, however many submissions have it.
CREATE TABLE blobs (
    blake3 TEXT COLLATE "C" PRIMARY KEY,
    bytes BIGINT NOT NULL,
    content BYTEA NOT NULL
);

CREATE TABLE submission_blobs (
    id TEXT COLLATE "C" NOT NULL,
    blake3 TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (id, blake3),
    FOREIGN KEY (id) REFERENCES submissions (id) ON DELETE CASCADE,
    FOREIGN KEY (blake3) REFERENCES blobs (blake3)
);
-- Whether anybody else has a file.
CREATE INDEX submission_blobs_blake3 ON submission_blobs (blake3);

-- A row for each attempt in the state `queued`, and for no other. Everybody's claims read these rows, so none may hold what
-- Fumehood cannot read: hence the checks, here and on the workers.
-- It changes all the time and is small, so the server clears it early.
CREATE TABLE queue (
    id TEXT COLLATE "C" NOT NULL,
    attempt BIGINT NOT NULL CHECK (attempt BETWEEN 1 AND 4294967295),
    submitter TEXT COLLATE "C" NOT NULL,
    -- Higher ones first.
    priority BIGINT NOT NULL CHECK (priority BETWEEN 0 AND 4294967295),
    -- Within a priority, lower ones first. Each submitter has one of each turn, so they take turns.
    turn BIGINT NOT NULL CHECK (turn BETWEEN 0 AND 1152921504606846976),
    queued_ms BIGINT NOT NULL CHECK (queued_ms BETWEEN 0 AND 4503599627370496),
    -- Since when it could have been taken.
    ready_ms BIGINT NOT NULL CHECK (ready_ms BETWEEN 0 AND 4503599627370496),
    -- Not to be taken before; NULL: ready.
    not_before_ms BIGINT CHECK (not_before_ms BETWEEN 0 AND 4503599627370496),
    memory_bytes BIGINT CHECK (memory_bytes >= 0),
    cpu_milli BIGINT CHECK (cpu_milli >= 0),
    PRIMARY KEY (id, attempt),
    FOREIGN KEY (id, attempt) REFERENCES attempts (id, attempt) ON DELETE CASCADE,
    FOREIGN KEY (id) REFERENCES submissions (id) ON DELETE CASCADE
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
-- The order in which they are taken.
CREATE INDEX queue_ready ON queue (priority DESC, turn, queued_ms, id) WHERE not_before_ms IS NULL;
CREATE INDEX queue_delayed ON queue (not_before_ms) WHERE not_before_ms IS NOT NULL;
-- The last turn of a submitter.
CREATE INDEX queue_turns ON queue (submitter, priority, turn) WHERE not_before_ms IS NULL;

CREATE TABLE workers (
    host TEXT COLLATE "C" NOT NULL,
    account TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    host_name TEXT NOT NULL,
    pid BIGINT NOT NULL CHECK (pid BETWEEN 0 AND 4294967295),
    version TEXT NOT NULL,
    slots BIGINT NOT NULL CHECK (slots BETWEEN 0 AND 4294967295),
    memory_bytes BIGINT NOT NULL CHECK (memory_bytes >= 0),
    cpu_milli BIGINT NOT NULL CHECK (cpu_milli >= 0),
    running BIGINT NOT NULL CHECK (running BETWEEN 0 AND 4294967295),
    draining BOOLEAN NOT NULL,
    -- The worker's clock, and the database's.
    started_ms BIGINT NOT NULL,
    seen_ms BIGINT NOT NULL CHECK (seen_ms BETWEEN 0 AND 4503599627370496),
    PRIMARY KEY (host, account, name)
);

CREATE TABLE events (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id TEXT COLLATE "C" NOT NULL,
    attempt BIGINT NOT NULL,
    ms BIGINT NOT NULL,
    event TEXT NOT NULL,
    reason TEXT,
    by TEXT,
    FOREIGN KEY (id) REFERENCES analyses (id) ON DELETE CASCADE
);
CREATE INDEX events_id ON events (id, seq);

CREATE OR REPLACE VIEW attempts_v1 AS
SELECT
    a.id,
    a.attempt,
    a.state,
    a.reason,
    a.message,
    a.superseded,
    a.host,
    a.submitter,
    CASE WHEN a.created_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(a.created_ms / 1000.0) END AS created_at,
    CASE WHEN a.started_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(a.started_ms / 1000.0) END AS started_at,
    CASE WHEN a.ended_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(a.ended_ms / 1000.0) END AS ended_at,
    CASE WHEN a.committed_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(a.committed_ms / 1000.0) END AS committed_at,
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
    CASE WHEN a.post_process_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(a.post_process_ms / 1000.0) END AS post_process_at,
    a.worker,
    a.retries_left,
    CASE WHEN a.cancel_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(a.cancel_ms / 1000.0) END AS cancel_at,
    a.cancel_by
FROM attempts a;

CREATE OR REPLACE VIEW analyses_v1 AS
SELECT v.*
FROM attempts_v1 v
WHERE NOT v.superseded
    AND NOT EXISTS (
        SELECT 1 FROM attempts b WHERE b.id = v.id AND b.attempt > v.attempt AND NOT b.superseded
    );

-- Neither requests nor the turns, which are Fumehood's own business.
CREATE VIEW queue_v1 AS
SELECT
    q.id,
    q.attempt,
    q.submitter,
    q.priority,
    CASE WHEN q.queued_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(q.queued_ms / 1000.0) END AS queued_at,
    CASE WHEN q.not_before_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(q.not_before_ms / 1000.0) END AS not_before_at,
    q.memory_bytes,
    q.cpu_milli
FROM queue q;

CREATE VIEW workers_v1 AS
SELECT
    w.host,
    w.account,
    w.name,
    w.host_name,
    w.pid,
    w.version,
    w.slots,
    w.memory_bytes,
    w.cpu_milli,
    w.running,
    w.draining,
    CASE WHEN w.started_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(w.started_ms / 1000.0) END AS started_at,
    CASE WHEN w.seen_ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(w.seen_ms / 1000.0) END AS seen_at
FROM workers w;

CREATE VIEW events_v1 AS
SELECT
    e.seq,
    e.id,
    e.attempt,
    CASE WHEN e.ms BETWEEN -62135596800000 AND 253402300799999 THEN to_timestamp(e.ms / 1000.0) END AS at,
    e.event,
    e.reason,
    e.by
FROM events e;
