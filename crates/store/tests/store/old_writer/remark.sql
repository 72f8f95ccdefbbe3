INSERT INTO remarks (id, attempt, position, path_text, remark) VALUES ($1, $2, $3, $4, $5)
