UPDATE attempts SET
    committed_by = $3, committed_ms = $4, state = $5, reason = $6, message = $7, started_ms = $8, ended_ms = $9,
    wall_ms = $10, cpu_ms = $11, memory_peak_bytes = $12, pids_peak = $13, disk_bytes = $14, files = $15,
    oom_kills = $16, exit_code = $17, signal = $18, isolation_level = $19, isolation = $20, limits = $21,
    hints = $22, notices = $23, provenance = COALESCE($24, provenance), complete = $25, outputs_count = $26,
    output_bytes = $27, refused_count = $28, result = $29, result_note = $30, post_process = $31
WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting')
