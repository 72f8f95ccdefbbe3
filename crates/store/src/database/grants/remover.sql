-- Added to the role of those who may run `fumehood rm` and `fumehood gc`.
GRANT DELETE ON fumehood.analyses, fumehood.attempts, fumehood.outputs TO fumehood_runner;
GRANT DELETE ON fumehood.logs, fumehood.remarks, fumehood.remark_counts TO fumehood_runner;
