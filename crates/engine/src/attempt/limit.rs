//! From [`FilledAttempt`] to [`ReadyAttempt`]: creates the cgroup. Also says who enforces each limit.

use sandbox::cgroup::{self, AncestorLimits, Group};
use sandbox::spec::{ConfinementLevel, Enforcement};

use crate::attempt::context::PlannedRun;
use crate::attempt::error::AttemptError;
use crate::attempt::states::{FilledAttempt, ReadyAttempt};
use crate::attempt::systemd_scope;
use crate::plan::limits::{self, EnforcementContext, error_chain};

impl<'r> FilledAttempt<'r> {
    /// A failure is kept in the state, and `ReadyAttempt::enforcement` decides whether the run may start without a cgroup. No durable step: the claim has recorded the
    /// group's paths.
    pub fn create_cgroup(self, run: &PlannedRun<'_>) -> ReadyAttempt<'r> {
        let limits = limits::group_limits(run.limits);
        let made = Group::create(&self.claimed.cgroup_host, run.request.id.as_str(), &limits);
        let group = made.map_err(|e| match systemd_scope::move_error() {
            None => error_chain(&e),
            Some(why) => format!("{}; {}", error_chain(&e), error_chain(why)),
        });
        ReadyAttempt {
            filled: self,
            group,
            init_may_live: false,
        }
    }
}

impl ReadyAttempt<'_> {
    /// Who enforces each limit at that level. Fails if a limit that the request sets explicitly would not be enforced
    /// as firmly as it must be, and `allow_degraded` does not name the limit; see `limits::enforcement`.
    pub fn enforcement(
        &self,
        run: &PlannedRun<'_>,
        level: ConfinementLevel,
    ) -> Result<Vec<Enforcement>, AttemptError> {
        let group = self.group.as_ref().map_err(Clone::clone);
        let outer = match group.as_ref().is_ok_and(|g| limits::group_suffices(g)) {
            true => AncestorLimits::default(),
            false => cgroup::ancestor_limits(),
        };
        let enforcement_context = EnforcementContext {
            level,
            has_own_uid: self.filled.claimed.run.lease.is_some(),
            storage: self.filled.storage,
        };
        Ok(limits::enforcement(
            &run.request.limits,
            run.limits,
            group,
            &outer,
            enforcement_context,
            &run.request.allow_degraded,
        )?)
    }
}
