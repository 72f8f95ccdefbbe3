//! What the attacker printed, line by line.

/// All that an attacker printed, and what it says of each attack.
#[derive(Default)]
pub struct Said {
    pub text: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    Got,
    Refused,
    Unable,
}

impl Said {
    pub fn new(text: &str) -> Said {
        Said { text: text.into() }
    }

    pub fn of(&self, act: &str) -> Option<(Word, &str)> {
        self.text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ' ');
            let word = match parts.next()? {
                "got" => Word::Got,
                "refused" => Word::Refused,
                "unable" => Word::Unable,
                _ => return None,
            };
            (parts.next()? == act).then(|| (word, parts.next().unwrap_or_default()))
        })
    }

    pub fn got(&self, act: &str) -> Option<&str> {
        self.of(act)
            .filter(|(word, _)| *word == Word::Got)
            .map(|(_, detail)| detail)
    }

    /// In a few words, for whoever reads the report.
    pub fn brief(&self, act: &str) -> String {
        match self.of(act) {
            Some((_, detail)) => detail.to_owned(),
            None => match self.of("all") {
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
        let said =
            Said::new("noise\ngot udp sent\nrefused udp_other EPERM\nunable x no kernel for it\n");
        assert_eq!(said.of("udp"), Some((Word::Got, "sent")));
        assert_eq!(said.of("udp_other"), Some((Word::Refused, "EPERM")));
        assert_eq!(said.of("x"), Some((Word::Unable, "no kernel for it")));
        assert_eq!(said.of("ud"), None);
        assert_eq!(said.brief("ud"), "it did not live to tell");
    }
}
