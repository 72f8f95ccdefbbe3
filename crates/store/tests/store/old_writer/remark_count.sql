INSERT INTO remark_counts (id, attempt, remark, count) VALUES ($1, $2, $3, $4)
