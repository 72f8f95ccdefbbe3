//! What the attacker printed, line by line: an answer, the name of the act, and a detail.

/// Everything that one attacker printed.
#[derive(Default)]
pub struct AttackOutput {
    pub text: String,
}

/// What became of an act, unconfined or in the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActResult {
    /// The act succeeded; the text is the evidence.
    Done(String),
    /// The act was refused; the text says how.
    Refused(String),
    /// The act could not be tried.
    Unable(String),
}

impl ActResult {
    /// Returns the text without the kind.
    fn detail(self) -> String {
        let (ActResult::Done(text) | ActResult::Refused(text) | ActResult::Unable(text)) = self;
        text
    }
}

impl AttackOutput {
    pub fn new(text: &str) -> AttackOutput {
        AttackOutput { text: text.into() }
    }

    /// Returns what the attacker says about an act.
    pub fn answer(&self, act: &str) -> Option<ActResult> {
        self.text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ' ');
            let kind = match parts.next()? {
                "got" => ActResult::Done,
                "refused" => ActResult::Refused,
                "unable" => ActResult::Unable,
                _ => return None,
            };
            (parts.next()? == act).then(|| kind(parts.next().unwrap_or_default().to_owned()))
        })
    }

    /// Returns what the attacker says that it achieved, if it does.
    pub fn success(&self, act: &str) -> Option<String> {
        let done = |answer: &ActResult| matches!(answer, ActResult::Done(_));
        self.answer(act).filter(done).map(ActResult::detail)
    }

    /// Returns a short explanation for the report.
    pub fn brief(&self, act: &str) -> String {
        let answer = self.answer(act).or_else(|| self.answer("all"));
        answer.map_or("it did not live to tell".into(), ActResult::detail)
    }

    /// Judges an act from the attacker's answer alone, where nothing else shows what happened.
    pub fn outcome(&self, act: &str) -> ActResult {
        self.answer(act)
            .unwrap_or_else(|| ActResult::Unable(self.brief(act)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_told_apart_by_the_act() {
        let attack_output = AttackOutput::new(
            "noise\ngot udp sent\nrefused udp_other EPERM\nunable x no kernel for it\n",
        );
        assert_eq!(
            attack_output.answer("udp"),
            Some(ActResult::Done("sent".into()))
        );
        assert_eq!(
            attack_output.answer("udp_other"),
            Some(ActResult::Refused("EPERM".into()))
        );
        assert_eq!(
            attack_output.answer("x"),
            Some(ActResult::Unable("no kernel for it".into()))
        );
        assert_eq!(attack_output.answer("ud"), None);
        assert_eq!(attack_output.brief("ud"), "it did not live to tell");
    }
}
