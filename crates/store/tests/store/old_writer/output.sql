INSERT INTO outputs (id, attempt, path, path_text, bytes, media_type, blake3, modified_ms, artifact_store, host, content)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
