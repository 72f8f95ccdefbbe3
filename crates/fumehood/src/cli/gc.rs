//! `fumehood gc`: what dead runners left, and kept workspaces.

use analysis::home::Home;
use analysis::reaper;

use super::{exit, show};

/// Remove what dead runners left behind and kept workspaces whose time is over.
#[derive(Clone, Debug, clap::Args)]
pub struct GcArgs {
    /// Also remove kept workspaces before their time: that of ID, or all
    #[arg(long, value_name = "ID", num_args = 0..=1)]
    pub kept: Option<Option<String>>,
}

pub fn gc(args: &GcArgs) -> anyhow::Result<u8> {
    let env = |name: &str| std::env::var_os(name).map(Into::into);
    let home = Home::find(&env)?.open()?;
    let reaped = match &args.kept {
        None => reaper::reap(&home),
        Some(id) => reaper::reap_kept(&home, id.as_deref()),
    };
    if let (Some(Some(id)), true) = (
        &args.kept,
        reaped.removed.is_empty() && reaped.problems.is_empty(),
    ) {
        show::line(&format!("nothing is kept for {id}"));
        return Ok(exit::COULD_NOT_RUN);
    }
    for path in &reaped.removed {
        show::line(&format!("removed {}", path.display()));
    }
    for (path, _) in &reaped.kept {
        show::line(&format!("still kept: {}", path.display()));
    }
    for problem in &reaped.problems {
        show::line(&format!("could not clean up: {problem}"));
    }
    Ok(if reaped.problems.is_empty() {
        0
    } else {
        exit::COULD_NOT_RUN
    })
}
