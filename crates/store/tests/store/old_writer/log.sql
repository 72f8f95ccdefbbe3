INSERT INTO logs (id, attempt, stream, total_bytes, dropped_bytes, truncated, head, tail, blake3, artifact_store, object_bytes, object_head_bytes)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
