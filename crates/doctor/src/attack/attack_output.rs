//! What the attacker printed, line by line: an answer, the name of the act, and a detail.

/// Everything that one attacker printed.
#[derive(Default)]
pub struct AttackOutput {
    pub text: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ActAnswer {
    Succeeded,
    Refused,
    Unable,
}

impl AttackOutput {
    pub fn new(text: &str) -> AttackOutput {
        AttackOutput { text: text.into() }
    }

    pub fn answer(&self, act: &str) -> Option<(ActAnswer, &str)> {
        self.text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ' ');
            let word = match parts.next()? {
                "got" => ActAnswer::Succeeded,
                "refused" => ActAnswer::Refused,
                "unable" => ActAnswer::Unable,
                _ => return None,
            };
            (parts.next()? == act).then(|| (word, parts.next().unwrap_or_default()))
        })
    }

    pub fn success(&self, act: &str) -> Option<&str> {
        self.answer(act)
            .filter(|(word, _)| *word == ActAnswer::Succeeded)
            .map(|(_, detail)| detail)
    }

    /// Returns a short explanation for the report.
    pub fn brief(&self, act: &str) -> String {
        match self.answer(act) {
            Some((_, detail)) => detail.to_owned(),
            None => match self.answer("all") {
                Some((_, detail)) => detail.to_owned(),
                None => "it did not live to tell".into(),
            },
        }
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
            Some((ActAnswer::Succeeded, "sent"))
        );
        assert_eq!(
            attack_output.answer("udp_other"),
            Some((ActAnswer::Refused, "EPERM"))
        );
        assert_eq!(
            attack_output.answer("x"),
            Some((ActAnswer::Unable, "no kernel for it"))
        );
        assert_eq!(attack_output.answer("ud"), None);
        assert_eq!(attack_output.brief("ud"), "it did not live to tell");
    }
}
