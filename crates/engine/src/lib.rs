//! One analysis from request to committed record, and the worker that runs queued analyses.
//!
//! # Theory of operation
//!
//! One process, the *runner*, makes one attempt. [`pipeline::run`] plans it and hands it to `attempt::make_attempt`, which
//! shows all transitions in their order:
//!
//! - [`settings`] merges options, variables, files and the operator's policy into a request. [`request`] says what is in
//!   one: what to run, within which limits. It comes from the command line or from the queue.
//! - [`plan`] turns the request into a plan: which paths the program sees, which runtime and environment it gets, which
//!   limits hold.
//! - [`attempt`] claims a run directory, creates the workspace and the cgroup, begins the database row, and runs the
//!   program in the sandbox. The sandbox crate confines the program; the program never shares a process with this
//!   crate.
//! - When every process of the program is dead, [`collect`] walks the workspace and lists the outputs, and
//!   `attempt::finalize` moves them into the artifact store and commits one transaction. The workspace is removed after
//!   that.
//!
//! [`run_dir`] keeps, in files that only the user who runs Fumehood can write, everything that finishing the attempt
//! needs. `run.json` is written before each thing that it names is made. The runner holds a lock on the run directory for
//! as long as it lives. So whoever gets that lock knows that the runner is dead, and [`recovery`] finishes or removes
//! what it left. `fumehood run` does that before each run, `fumehood gc` and the worker do it now and then.
//!
//! [`worker`] claims queued analyses and starts one runner process for each. A runner renews its own lease and commits
//! its own result, so the worker may die or be upgraded while runners go on.
//!
//! [`home`] says where all of this is kept, and [`workspace`] and [`provenance`] serve the stages above.
//!
//! Only the sandbox crate uses `unsafe` code and raw system calls. All SQL is in the store crate. Everything here is
//! blocking code.
//!
//! # Example
//!
//! Runs a command as `fumehood run` would, and prints what became of it. `examples/embed` is the whole program: its `main`
//! first calls [`sandbox::launch::main`] if this process was started as the launcher.
//!
//! ```no_run
//! use engine::attempt::log_capture::OutputChunk;
//! use engine::attempt::recorder::Recorder;
//! use engine::home::Home;
//! use engine::pipeline::{self, RunContext, RunObserver};
//! use engine::request::Command;
//! use engine::settings::{self, Sources};
//! use sandbox::supervise::Stream;
//!
//! struct Silent;
//!
//! impl RunObserver for Silent {
//!     fn output(&mut self, _: Stream, _: OutputChunk<'_>) {}
//! }
//!
//! let command = Command::Argv(vec!["python3".into(), "-c".into(), "print(6 * 7)".into()]);
//! let resolved = settings::run_request(command, Vec::new(), &Sources::from_process()?)?;
//! let home = Home::from_process()?.open()?;
//! let mut recorder = Recorder::from_settings(&resolved.record, &home)?;
//! let context = RunContext::new(home, &resolved.record);
//! let completed = pipeline::run(&resolved.request, &context, recorder.as_mut(), &mut Silent);
//! let record = completed.map_err(|failure| failure.error)?.record;
//! println!("{} {}", record.id, record.status.as_str());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod attempt;
pub mod collect;
pub mod home;
pub mod pipeline;
pub mod plan;
pub mod provenance;
pub mod recovery;
pub mod request;
pub mod run_dir;
pub mod settings;
pub mod worker;
pub mod workspace;
