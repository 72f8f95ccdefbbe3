INSERT INTO attempts (id, attempt, key, state, superseded, host, boot_id, submitter, workspace, provenance, created_ms)
VALUES ($1, $2, $3, 'running', $4, $5, $6, $7, $8, $9, $10)
