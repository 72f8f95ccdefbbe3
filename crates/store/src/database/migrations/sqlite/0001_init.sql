-- Runs in one transaction.

CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    schema_major INTEGER NOT NULL,
    schema_minor INTEGER NOT NULL,
    database_id TEXT NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE analyses (
    id TEXT PRIMARY KEY,
    created_ms INTEGER NOT NULL,
    -- The highest attempt number given out. Raising it locks the analysis for the rest of the transaction.
    attempt_last INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE attempts (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    -- The token of this attempt, 128 bits in hex. Who has it may commit the attempt, so no view shows it.
    key TEXT NOT NULL UNIQUE,
    -- The token of whoever made the state final; another one than `key` means that the attempt was given up by somebody else.
    committed_by TEXT,
    -- No CHECK: a state added later must not need a new table on SQLite, which cannot alter one.
    state TEXT NOT NULL,
    reason TEXT,
    message TEXT,
    superseded INTEGER NOT NULL DEFAULT FALSE CHECK (superseded IN (0, 1)),
    host TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    submitter TEXT,
    workspace TEXT,
    -- created_ms and committed_ms are the database's own clock; started_ms and ended_ms are the runner's.
    created_ms INTEGER NOT NULL,
    started_ms INTEGER,
    ended_ms INTEGER,
    committed_ms INTEGER,
    wall_ms INTEGER,
    cpu_ms INTEGER,
    memory_peak_bytes INTEGER,
    pids_peak INTEGER,
    disk_bytes INTEGER,
    files INTEGER,
    oom_kills INTEGER,
    exit_code INTEGER,
    signal INTEGER,
    isolation_level TEXT,
    isolation TEXT,
    limits TEXT,
    hints TEXT,
    notices TEXT,
    provenance TEXT,
    complete INTEGER CHECK (complete IN (0, 1)),
    outputs_count INTEGER,
    output_bytes INTEGER,
    refused_count INTEGER,
    result TEXT,
    result_note TEXT,
    PRIMARY KEY (id, attempt),
    FOREIGN KEY (id) REFERENCES analyses (id)
) STRICT;

CREATE TABLE outputs (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    path BLOB NOT NULL,
    -- The same path, escaped so that it round-trips.
    path_text TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    media_type TEXT NOT NULL,
    blake3 TEXT NOT NULL,
    modified_ms INTEGER NOT NULL,
    artifact_store TEXT NOT NULL,
    host TEXT NOT NULL,
    -- The bytes themselves, of small outputs.
    content BLOB,
    PRIMARY KEY (id, attempt, path),
    FOREIGN KEY (id, attempt) REFERENCES attempts (id, attempt)
) STRICT;

CREATE TABLE remarks (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    position INTEGER NOT NULL,
    path_text TEXT NOT NULL,
    remark TEXT NOT NULL,
    PRIMARY KEY (id, attempt, position),
    FOREIGN KEY (id, attempt) REFERENCES attempts (id, attempt)
) STRICT;

CREATE TABLE remark_counts (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    remark TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (id, attempt, remark),
    FOREIGN KEY (id, attempt) REFERENCES attempts (id, attempt)
) STRICT;

CREATE TABLE logs (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    stream TEXT NOT NULL,
    total_bytes INTEGER NOT NULL,
    dropped_bytes INTEGER NOT NULL,
    truncated INTEGER NOT NULL CHECK (truncated IN (0, 1)),
    -- Excerpts: the first and the last bytes that were kept.
    head BLOB NOT NULL,
    tail BLOB NOT NULL,
    -- The whole of what was kept, where it is an object of an artifact store: first bytes, then last bytes.
    blake3 TEXT,
    artifact_store TEXT,
    object_bytes INTEGER,
    object_head_bytes INTEGER,
    PRIMARY KEY (id, attempt, stream),
    FOREIGN KEY (id, attempt) REFERENCES attempts (id, attempt)
) STRICT;

-- What other programs may rely on. Columns are only ever added, at the end. A time outside the years 1 to 9999 is
-- NULL: a program may date its files as it likes, and must not make the view fail for everybody.
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
    a.result_note
FROM attempts a;

CREATE VIEW analyses_v1 AS
SELECT v.*
FROM attempts_v1 v
WHERE NOT v.superseded
    AND NOT EXISTS (
        SELECT 1 FROM attempts b WHERE b.id = v.id AND b.attempt > v.attempt AND NOT b.superseded
    );

CREATE VIEW outputs_v1 AS
SELECT
    o.id,
    o.attempt,
    o.path,
    o.path_text,
    o.bytes,
    o.media_type,
    o.blake3,
    CASE WHEN o.modified_ms BETWEEN -62135596800000 AND 253402300799999
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', o.modified_ms / 1000.0, 'unixepoch') END AS modified_at,
    o.artifact_store,
    o.host,
    o.content
FROM outputs o;

CREATE VIEW logs_v1 AS
SELECT
    l.id,
    l.attempt,
    l.stream,
    l.total_bytes,
    l.dropped_bytes,
    l.truncated,
    l.head,
    l.tail,
    l.blake3,
    l.artifact_store,
    l.object_bytes,
    l.object_head_bytes
FROM logs l;

CREATE VIEW remarks_v1 AS
SELECT r.id, r.attempt, r.position, r.path_text, r.remark
FROM remarks r;

CREATE VIEW remark_counts_v1 AS
SELECT c.id, c.attempt, c.remark, c.count
FROM remark_counts c;
