INSERT INTO analyses (id, created_ms, attempt_last) VALUES ($1, $2, 0) ON CONFLICT (id) DO NOTHING
