-- Other programs: the views and nothing else.
GRANT USAGE ON SCHEMA fumehood TO fumehood_reader;
GRANT SELECT ON fumehood.analyses_v1, fumehood.attempts_v1, fumehood.outputs_v1 TO fumehood_reader;
GRANT SELECT ON fumehood.logs_v1, fumehood.remarks_v1, fumehood.remark_counts_v1 TO fumehood_reader;
GRANT SELECT ON fumehood.queue_v1, fumehood.workers_v1, fumehood.events_v1 TO fumehood_reader;
