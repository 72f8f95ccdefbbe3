-- The role that runs analyses and reads the record. Run as the owner of the schema, again after each migration.
GRANT USAGE ON SCHEMA fumehood TO fumehood_runner;
GRANT SELECT ON fumehood.meta TO fumehood_runner;
GRANT SELECT, INSERT, UPDATE ON fumehood.analyses, fumehood.attempts TO fumehood_runner;
GRANT SELECT, INSERT, UPDATE ON fumehood.outputs, fumehood.logs TO fumehood_runner;
GRANT SELECT, INSERT, UPDATE ON fumehood.remarks, fumehood.remark_counts TO fumehood_runner;
GRANT SELECT, INSERT, UPDATE, DELETE ON fumehood.queue, fumehood.workers TO fumehood_runner;
GRANT SELECT, INSERT, UPDATE, DELETE ON fumehood.submissions, fumehood.blobs, fumehood.submission_blobs TO fumehood_runner;
GRANT SELECT, INSERT ON fumehood.events TO fumehood_runner;
