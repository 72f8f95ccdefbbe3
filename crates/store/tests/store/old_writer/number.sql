UPDATE analyses SET attempt_last = attempt_last + 1 WHERE id = $1
