-- The queue: analyses that wait, who takes them, and what became of them.

-- Until when the runner answers for the attempt, by the database's clock; NULL for those of `fumehood run`.
ALTER TABLE attempts ADD COLUMN lease_ms INTEGER CHECK (lease_ms BETWEEN 0 AND 4503599627370496);
-- When somebody first wanted it cancelled, and who.
ALTER TABLE attempts ADD COLUMN cancel_ms INTEGER;
ALTER TABLE attempts ADD COLUMN cancel_by TEXT;
-- How often it may still be tried again; NULL: it did not come from the queue.
ALTER TABLE attempts ADD COLUMN retries_left INTEGER CHECK (retries_left BETWEEN 0 AND 4294967295);
-- The name of the worker that took it.
ALTER TABLE attempts ADD COLUMN worker TEXT;

-- Expired leases and wishes to cancel are looked for among the attempts that run, by the index that is there: a lease
-- changes every few seconds, and an index of its own would have to change with it.

-- What was asked for. What hangs on an analysis goes with it, also when an older Fumehood removes it, which does not
-- know these tables: hence the cascades.
CREATE TABLE submissions (
    id TEXT PRIMARY KEY,
    -- Whoever submits with the same key again is told of this one.
    submit_key TEXT UNIQUE,
    fingerprint TEXT NOT NULL,
    -- JSON as it was sent, byte by byte; may hold secrets, so no view shows it.
    request TEXT NOT NULL,
    submitter TEXT NOT NULL,
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 4294967295),
    retries INTEGER NOT NULL CHECK (retries BETWEEN 0 AND 4294967295),
    -- States, divided by commas.
    retry_on TEXT NOT NULL,
    memory_bytes INTEGER CHECK (memory_bytes >= 0),
    cpu_milli INTEGER CHECK (cpu_milli >= 0),
    created_ms INTEGER NOT NULL,
    FOREIGN KEY (id) REFERENCES analyses (id) ON DELETE CASCADE
) STRICT;

-- Files that were submitted, each once, however many submissions have it.
CREATE TABLE blobs (
    blake3 TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL,
    content BLOB NOT NULL
) STRICT;

CREATE TABLE submission_blobs (
    id TEXT NOT NULL,
    blake3 TEXT NOT NULL,
    PRIMARY KEY (id, blake3),
    FOREIGN KEY (id) REFERENCES submissions (id) ON DELETE CASCADE,
    FOREIGN KEY (blake3) REFERENCES blobs (blake3)
) STRICT;
-- Whether anybody else has a file.
CREATE INDEX submission_blobs_blake3 ON submission_blobs (blake3);

-- A row for each attempt in the state `queued`, and for no other. Everybody's claims read these rows, so none may hold what
-- Fumehood cannot read: hence the checks, here and on the workers.
CREATE TABLE queue (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL CHECK (attempt BETWEEN 1 AND 4294967295),
    submitter TEXT NOT NULL,
    -- Higher ones first.
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 4294967295),
    -- Within a priority, lower ones first. Each submitter has one of each turn, so they take turns.
    turn INTEGER NOT NULL CHECK (turn BETWEEN 0 AND 1152921504606846976),
    queued_ms INTEGER NOT NULL CHECK (queued_ms BETWEEN 0 AND 4503599627370496),
    -- Since when it could have been taken.
    ready_ms INTEGER NOT NULL CHECK (ready_ms BETWEEN 0 AND 4503599627370496),
    -- Not to be taken before; NULL: ready.
    not_before_ms INTEGER CHECK (not_before_ms BETWEEN 0 AND 4503599627370496),
    memory_bytes INTEGER CHECK (memory_bytes >= 0),
    cpu_milli INTEGER CHECK (cpu_milli >= 0),
    PRIMARY KEY (id, attempt),
    FOREIGN KEY (id, attempt) REFERENCES attempts (id, attempt) ON DELETE CASCADE,
    FOREIGN KEY (id) REFERENCES submissions (id) ON DELETE CASCADE
) STRICT;
-- The order in which they are taken.
CREATE INDEX queue_ready ON queue (priority DESC, turn, queued_ms, id) WHERE not_before_ms IS NULL;
CREATE INDEX queue_delayed ON queue (not_before_ms) WHERE not_before_ms IS NOT NULL;
-- The last turn of a submitter.
CREATE INDEX queue_turns ON queue (submitter, priority, turn) WHERE not_before_ms IS NULL;

CREATE TABLE workers (
    host TEXT NOT NULL,
    account TEXT NOT NULL,
    name TEXT NOT NULL,
    host_name TEXT NOT NULL,
    pid INTEGER NOT NULL CHECK (pid BETWEEN 0 AND 4294967295),
    version TEXT NOT NULL,
    slots INTEGER NOT NULL CHECK (slots BETWEEN 0 AND 4294967295),
    memory_bytes INTEGER NOT NULL CHECK (memory_bytes >= 0),
    cpu_milli INTEGER NOT NULL CHECK (cpu_milli >= 0),
    running INTEGER NOT NULL CHECK (running BETWEEN 0 AND 4294967295),
    draining INTEGER NOT NULL CHECK (draining IN (0, 1)),
    -- The worker's clock, and the database's.
    started_ms INTEGER NOT NULL,
    seen_ms INTEGER NOT NULL CHECK (seen_ms BETWEEN 0 AND 4503599627370496),
    PRIMARY KEY (host, account, name)
) STRICT;

CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    ms INTEGER NOT NULL,
    event TEXT NOT NULL,
    reason TEXT,
    by TEXT,
    FOREIGN KEY (id) REFERENCES analyses (id) ON DELETE CASCADE
) STRICT;
CREATE INDEX events_id ON events (id, seq);

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
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.post_process_ms / 1000.0, 'unixepoch') END AS post_process_at,
    a.worker,
    a.retries_left,
    CASE WHEN a.cancel_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', a.cancel_ms / 1000.0, 'unixepoch') END AS cancel_at,
    a.cancel_by
FROM attempts a;

CREATE VIEW analyses_v1 AS
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
    CASE WHEN q.queued_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', q.queued_ms / 1000.0, 'unixepoch') END AS queued_at,
    CASE WHEN q.not_before_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', q.not_before_ms / 1000.0, 'unixepoch') END AS not_before_at,
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
    CASE WHEN w.started_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', w.started_ms / 1000.0, 'unixepoch') END AS started_at,
    CASE WHEN w.seen_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', w.seen_ms / 1000.0, 'unixepoch') END AS seen_at
FROM workers w;

CREATE VIEW events_v1 AS
SELECT
    e.seq,
    e.id,
    e.attempt,
    CASE WHEN e.ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', e.ms / 1000.0, 'unixepoch') END AS at,
    e.event,
    e.reason,
    e.by
FROM events e;
