//! Which directory a link called `data` or `docs` may show: one of the project's own, and no other unless the caller names it.

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::lab::{Lab, finish};
use crate::submit::Worker;
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "a_link_called_data_shows_nothing_outside_the_project",
        For::Everyone,
        outside,
    ),
    (
        "a_link_called_data_shows_nothing_private_of_the_project",
        For::Everyone,
        private_of_project,
    ),
    (
        "a_projects_file_shows_nothing_private_of_the_project",
        For::Everyone,
        project_file,
    ),
    (
        "a_link_called_data_is_followed_when_it_is_submitted",
        For::Everyone,
        submitted,
    ),
    (
        "links_in_data_lead_nowhere_outside_it",
        For::Everyone,
        links_inside,
    ),
];

const SHOW: &str = "cat data/.env data/table docs/.env docs/table 2>/dev/null; true";

fn lab() -> Lab {
    let lab = Lab::new();
    lab.write("other/.env", "SECRET\n");
    lab.write("other/table", "SECRET\n");
    lab.write("project/.git/table", "SECRET\n");
    lab.write("project/.git/.env", "SECRET\n");
    lab.write("project/.hidden/table", "SECRET\n");
    lab.write("project/.env", "SECRET\n");
    lab.write("project/table", "SECRET\n");
    lab.write("project/site/table", "SECRET\n");
    lab.write("project/site/deep/table", "SECRET\n");
    lab.write("project/backend/.env.local", "SECRET\n");
    lab.write("project/backend/table", "SECRET\n");
    lab.write("project/storage/2024/table", "measured\n");
    lab
}

fn relink(lab: &Lab, name: &str, to: &Path) {
    let link = lab.project.join(name);
    let _none = std::fs::remove_file(&link);
    symlink(to, link).unwrap();
}

fn is_refused(lab: &Lab, name: &str, to: &Path, line: &str) {
    relink(lab, name, to);
    let ended = lab.sh(&[], SHOW);
    assert!(!ended.out().contains("SECRET"), "{name} -> {to:?}");
    ended.refused(125, line);
    std::fs::remove_file(lab.project.join(name)).unwrap();
}

fn outside() {
    let lab = lab();
    let other = lab.path("other").canonicalize().unwrap();
    for name in ["data", "docs"] {
        let line = format!("    --{name} {}\n", other.display());
        is_refused(&lab, name, Path::new("../other"), &line);
        is_refused(&lab, name, &other, &line);
        // Through a link that is itself below the project.
        relink(&lab, "hop", &other);
        is_refused(&lab, name, Path::new("hop"), &line);
        relink(&lab, "hop", Path::new(".."));
        is_refused(&lab, name, Path::new("hop/other"), &line);
        is_refused(&lab, name, Path::new("/"), &format!("--{name} /"));
        is_refused(&lab, name, Path::new(".."), &format!("--{name} "));
        // The control: the line that the error prints, and the same in a variable and in the user's own file.
        relink(&lab, name, &other);
        let flag = format!("--{name}");
        let named = other.to_str().unwrap();
        let ended = lab.sh(&[&flag, named], SHOW);
        assert_eq!(ended.good(), "SECRET\nSECRET\n");
        let mut command = lab.run_command(["--", "sh", "-c", SHOW]);
        command.env(format!("FUMEHOOD_{}", name.to_uppercase()), &other);
        assert_eq!(finish(command).good(), "SECRET\nSECRET\n");
        let own = lab.write(
            "person/.config/fumehood/config.toml",
            format!("{name} = {named:?}\n"),
        );
        assert_eq!(lab.sh(&[], SHOW).good(), "SECRET\nSECRET\n");
        std::fs::remove_file(own).unwrap();
        std::fs::remove_file(lab.project.join(name)).unwrap();
    }
}

fn private_of_project() {
    let lab = lab();
    let real = |name: &str| lab.project.join(name).canonicalize().unwrap();
    for to in [".", ".git", ".hidden", "site", "site/deep", "backend"] {
        let to = Path::new(to);
        is_refused(&lab, "data", to, "--data ");
    }
    is_refused(&lab, "docs", &real("."), "--docs ");
    // The controls: a visible directory of the project by a link, and a directory of its own whatever it holds.
    for to in [Path::new("storage/2024").to_owned(), real("storage/2024")] {
        relink(&lab, "data", &to);
        assert_eq!(lab.sh(&[], SHOW).good(), "measured\n");
    }
    std::fs::remove_file(lab.project.join("data")).unwrap();
    lab.write("project/data/.env", "its own\n");
    lab.write("project/data/.git/config", "");
    assert_eq!(lab.sh(&[], SHOW).good(), "its own\n");
}

fn project_file() {
    let lab = lab();
    for (named, says) in [
        ("backend", "--data "),
        ("site", "--data "),
        ("../other", "--data"),
        (".git", "--data"),
    ] {
        lab.write("project/fumehood.toml", format!("data = {named:?}\n"));
        let ended = lab.sh(&[], SHOW);
        assert!(!ended.out().contains("SECRET"), "{named}");
        ended.refused(125, says);
    }
    lab.write("project/fumehood.toml", "data = \"storage/2024\"\n");
    assert_eq!(lab.sh(&[], SHOW).good(), "measured\n");
}

fn submitted() {
    let lab = lab();
    let ask = |words: &[&str]| lab.ask(words.iter().copied());
    let submit = |id: &str, more: &[&str]| {
        let mut words = vec!["submit", "--id", id, "--retries", "0"];
        words.extend(more);
        words.extend(["--", "sh", "-c", SHOW]);
        ask(&words)
    };
    relink(&lab, "data", &lab.path("other"));
    submit("x", &[]).refused(125, "--data ");
    relink(&lab, "data", Path::new("storage/2024"));
    submit("a", &[]).good();
    submit("b", &[]).good();
    let link = lab.project.join("data");
    submit("c", &["--data", link.to_str().unwrap()]).good();
    // What the link leads to afterwards is nobody's wish.
    relink(&lab, "data", &lab.path("other"));
    std::fs::remove_file(&link).unwrap();
    lab.write("project/data/table", "later\n");
    submit("d", &[]).good();
    std::fs::remove_dir_all(&link).unwrap();
    relink(&lab, "data", &lab.path("other"));
    let worker = Worker::at_any_level(&lab);
    ask(&["wait", "a", "b", "c", "d"]);
    drop(worker);
    for id in ["a", "b", "c"] {
        assert_eq!(ask(&["logs", id]).good(), "measured\n", "{id}");
    }
    let ended = ask(&["show", "d"]);
    let shown = ended.out();
    assert!(
        shown.contains("error") && shown.contains("--data"),
        "{shown}"
    );
    assert!(!ask(&["logs", "d"]).out().contains("SECRET"));
}

fn links_inside() {
    let lab = lab();
    lab.write("project/data/table", "measured\n");
    let other = lab.path("other");
    for (name, to) in [
        ("up", Path::new("..")),
        ("env", Path::new("../.env")),
        ("other", other.as_path()),
        ("cwd", Path::new("/proc/1/cwd")),
    ] {
        symlink(to, lab.project.join("data").join(name)).unwrap();
    }
    let script = "cat data/env data/other/table data/up/table data/up/.git/table data/cwd/table 2>/dev/null; cat data/table";
    for level in ["full", "landlock"] {
        let ended = lab.sh(&["--level", level], script);
        assert_eq!(ended.good(), "measured\n", "{level}");
    }
}
