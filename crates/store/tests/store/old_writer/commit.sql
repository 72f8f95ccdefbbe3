UPDATE attempts SET
    committed_by = $3, committed_ms = $4, state = $5, reason = $6, message = $7, started_ms = $8, ended_ms = $9,
    wall_ms = $10, cpu_ms = $11, memory_peak_bytes = $12, pids_peak = $13, disk_bytes = $14, files = $15,
    oom_kills = $16, exit_code = $17, signal = $18, isolation_level = $19, isolation = $20, limits = $21,
    hints = $22, notices = $23, complete = $24, outputs_count = $25, output_bytes = $26, refused_count = $27,
    result = $28, result_note = $29
WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting')
