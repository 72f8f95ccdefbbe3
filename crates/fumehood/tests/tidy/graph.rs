//! The module graph of each crate: which file uses an item that another file defines. The graph has no cycle.
//!
//! A name is followed through `use` and `pub use` to the module that defines it, so a re-export in a `mod.rs` hides no edge.
//! Paths inside macro calls count. Items under `#[cfg(test)]` do not count. An edge between a module and one of its
//! ancestors does not count either: a `mod.rs` may use its children, and a child may use what its `mod.rs` defines.
//!
//! A call of a method is no path, so the graph does not see which file has the `impl`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use proc_macro2::{Spacing, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, UseTree};

use crate::sources::{crates, read_if_there};

/// How much of a module's path is a node of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The first name: the folders and files beside `lib.rs`.
    Folders,
    /// The whole path: every file.
    Files,
}

/// The names of a module's path below the crate's root; empty for the root.
type ModulePath = Vec<String>;

/// What a file or an inline module declares and mentions.
#[derive(Default)]
pub struct Module {
    /// The module of the file that this module is in: itself, unless it is inline.
    file: ModulePath,
    children: BTreeSet<String>,
    /// Everything else that has a name here: types, functions, constants, macros.
    items: BTreeSet<String>,
    /// Local name and path of each import; `*` for a glob.
    imports: Vec<(String, Vec<String>)>,
    /// Every path that is mentioned.
    mentions: BTreeSet<Vec<String>>,
    /// The structs, enums, unions, traits and type aliases that other modules can see.
    pub public_types: Vec<String>,
}

/// The modules of one crate, without those under `#[cfg(test)]`.
pub struct CrateModules {
    pub modules: BTreeMap<ModulePath, Module>,
}

/// What a name stands for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Module(ModulePath),
    /// An item that this module defines.
    ItemOf(ModulePath),
}

impl CrateModules {
    /// Reads a crate, beginning with its root file. `read` gets the path of a file within the crate's `src` directory.
    pub fn read(root: &str, read: &dyn Fn(&str) -> Option<String>) -> CrateModules {
        let mut modules = BTreeMap::new();
        let text = read(root).unwrap_or_else(|| panic!("{root} cannot be read"));
        let mut reader = Reader {
            read,
            modules: &mut modules,
        };
        reader.file(Vec::new(), root, "", &text);
        CrateModules { modules }
    }

    /// The file-level edges, each with one path that makes it.
    fn edges(&self) -> BTreeMap<(ModulePath, ModulePath), String> {
        let mut edges = BTreeMap::new();
        for (path, module) in &self.modules {
            for mention in &module.mentions {
                let targets = self.resolve(path, mention, &mut BTreeSet::new());
                for target in targets {
                    let Target::ItemOf(definer) = target else {
                        continue;
                    };
                    let (from, to) = (&module.file, &self.modules[&definer].file);
                    if !from.starts_with(to) && !to.starts_with(from) {
                        let edge = (from.clone(), to.clone());
                        edges.entry(edge).or_insert_with(|| mention.join("::"));
                    }
                }
            }
        }
        edges
    }

    /// What a path stands for in a module. Names from other crates and local variables stand for nothing.
    fn resolve(
        &self,
        from: &ModulePath,
        path: &[String],
        seen: &mut BTreeSet<(ModulePath, String)>,
    ) -> BTreeSet<Target> {
        let mut rest = path;
        let mut targets = BTreeSet::new();
        match rest.first().map(String::as_str) {
            Some("crate") => {
                targets.insert(Target::Module(Vec::new()));
                rest = &rest[1..];
            }
            Some("self" | "super") => {
                let mut at = from.clone();
                while let Some("self" | "super") = rest.first().map(String::as_str) {
                    if rest[0] == "super" && at.pop().is_none() {
                        return targets;
                    }
                    rest = &rest[1..];
                }
                targets.insert(Target::Module(at));
            }
            Some(name) => {
                targets = self.lookup(from, name, seen);
                rest = &rest[1..];
            }
            None => {}
        }
        for name in rest {
            let next = targets.into_iter().flat_map(|target| match target {
                Target::Module(module) => self.lookup(&module, name, seen),
                // A variant, an associated function or the like.
                item => BTreeSet::from([item]),
            });
            targets = next.collect();
        }
        targets
    }

    /// What a name stands for in a module: a child, an item of its own, or an import.
    fn lookup(
        &self,
        at: &ModulePath,
        name: &str,
        seen: &mut BTreeSet<(ModulePath, String)>,
    ) -> BTreeSet<Target> {
        let mut targets = BTreeSet::new();
        // Two modules may import each other's names by globs. `seen` then ends the search.
        let Some(module) = self.modules.get(at) else {
            return targets;
        };
        if !seen.insert((at.clone(), name.to_owned())) {
            return targets;
        }
        if module.children.contains(name) {
            let child: ModulePath = at.iter().cloned().chain([name.to_owned()]).collect();
            if self.modules.contains_key(&child) {
                targets.insert(Target::Module(child));
            }
        }
        if module.items.contains(name) {
            targets.insert(Target::ItemOf(at.clone()));
        }
        for (local, path) in &module.imports {
            if local == name {
                targets.extend(self.resolve(at, path, seen));
            }
        }
        if targets.is_empty() {
            for (_, path) in module.imports.iter().filter(|(local, _)| local == "*") {
                for target in self.resolve(at, path, seen) {
                    if let Target::Module(from) = target {
                        targets.extend(self.lookup(&from, name, seen));
                    }
                }
            }
        }
        seen.remove(&(at.clone(), name.to_owned()));
        targets
    }

    /// Each set of modules in which every module leads to every other, with the edges between them.
    pub fn cycles(&self, depth: Depth) -> Vec<Cycle> {
        let node = |path: &ModulePath| match depth {
            Depth::Folders => path[..1].join("/"),
            Depth::Files => path.join("/"),
        };
        let mut edges: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for ((from, to), mention) in self.edges() {
            let (from, to) = (node(&from), node(&to));
            if from != to {
                let of_it = edges.entry(from).or_default();
                of_it.entry(to).or_insert(mention);
            }
        }
        let reachable = |start: &String| {
            let mut found: BTreeSet<String> = BTreeSet::new();
            let mut pending = vec![start.clone()];
            while let Some(at) = pending.pop() {
                for to in edges.get(&at).into_iter().flat_map(BTreeMap::keys) {
                    if found.insert(to.clone()) {
                        pending.push(to.clone());
                    }
                }
            }
            found
        };
        let reach: BTreeMap<&String, BTreeSet<String>> =
            edges.keys().map(|from| (from, reachable(from))).collect();
        let mut cycles: Vec<Cycle> = Vec::new();
        for (start, found) in &reach {
            let is_both_ways =
                |other: &&String| reach.get(*other).is_some_and(|back| back.contains(*start));
            let modules: BTreeSet<String> = found.iter().filter(is_both_ways).cloned().collect();
            if modules.is_empty() || cycles.iter().any(|cycle| cycle.modules == modules) {
                continue;
            }
            let mut lines = Vec::new();
            for from in &modules {
                for (to, mention) in &edges[from] {
                    if modules.contains(to) {
                        lines.push(format!("    {from} -> {to}: {mention}"));
                    }
                }
            }
            cycles.push(Cycle {
                modules,
                edges: lines,
            });
        }
        cycles
    }
}

/// Modules that lead to each other.
pub struct Cycle {
    pub modules: BTreeSet<String>,
    /// One line for each edge, with a path that makes it.
    edges: Vec<String>,
}

/// Follows the `mod` declarations of a crate.
struct Reader<'a> {
    read: &'a dyn Fn(&str) -> Option<String>,
    modules: &'a mut BTreeMap<ModulePath, Module>,
}

impl Reader<'_> {
    /// `dir` is where the files of this module's children are.
    fn file(&mut self, path: ModulePath, name: &str, dir: &str, text: &str) {
        let file = syn::parse_file(text).unwrap_or_else(|e| panic!("{name}: {e}"));
        self.items(path.clone(), &path, dir, &file.items);
    }

    fn items(&mut self, path: ModulePath, file: &ModulePath, dir: &str, items: &[Item]) {
        let mut module = Module {
            file: file.clone(),
            ..Module::default()
        };
        for item in items
            .iter()
            .filter(|item| !is_test_only(item_attributes(item)))
        {
            if let Some(name) = item_name(item) {
                module.items.insert(name);
            }
            let Item::Mod(declared) = item else {
                continue;
            };
            let name = declared.ident.to_string();
            module.children.insert(name.clone());
            let child: ModulePath = path.iter().cloned().chain([name.clone()]).collect();
            match &declared.content {
                Some((_, items)) => self.items(child, file, &format!("{dir}{name}/"), items),
                None => self.child_file(child, dir, &name, path_attribute(&declared.attrs)),
            }
        }
        let mut mentions = Mentions {
            module: &mut module,
        };
        for item in items {
            mentions.visit_item(item);
        }
        self.modules.insert(path, module);
    }

    fn child_file(&mut self, child: ModulePath, dir: &str, name: &str, given: Option<String>) {
        let below = format!("{dir}{name}/");
        let candidates = match given {
            Some(given) => vec![format!("{dir}{given}")],
            None => vec![format!("{dir}{name}.rs"), format!("{below}mod.rs")],
        };
        let found = candidates
            .iter()
            .find_map(|file| Some((file, (self.read)(file)?)));
        let (file, text) = found.unwrap_or_else(|| panic!("none of {candidates:?} can be read"));
        self.file(child, file, &below, &text);
    }
}

/// Collects what a module mentions, without its inline modules and without what is for tests.
struct Mentions<'a> {
    module: &'a mut Module,
}

impl Mentions<'_> {
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        // The number of colons since the last name, and whether a dot precedes the next name, which is then a field or
        // a method.
        let (mut colons, mut after_dot) = (0, false);
        for token in tokens {
            match &token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.mention(std::mem::take(&mut path));
                    }
                    match after_dot {
                        true => path.clear(),
                        false => path.push(name.to_string()),
                    }
                    (colons, after_dot) = (0, false);
                    continue;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => {
                    let is_second = colons == 1 && mark.spacing() == Spacing::Alone;
                    let is_first = colons == 0 && mark.spacing() == Spacing::Joint;
                    if is_second || is_first {
                        colons += 1;
                        continue;
                    }
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => {}
            }
            self.mention(std::mem::take(&mut path));
            colons = 0;
            after_dot = matches!(&token, TokenTree::Punct(mark) if mark.as_char() == '.');
        }
        self.mention(path);
    }

    fn mention(&mut self, path: Vec<String>) {
        if !path.is_empty() {
            self.module.mentions.insert(path);
        }
    }

    fn import(&mut self, prefix: &[String], tree: &UseTree) {
        let with = |name: String| {
            let mut path = prefix.to_vec();
            if name != "self" || path.is_empty() {
                path.push(name);
            }
            path
        };
        let (local, path) = match tree {
            UseTree::Path(tree) => {
                return self.import(&with(tree.ident.to_string()), &tree.tree);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(prefix, tree);
                }
                return;
            }
            UseTree::Glob(_) => ("*".to_owned(), prefix.to_vec()),
            UseTree::Name(name) => {
                let path = with(name.ident.to_string());
                (path.last().cloned().unwrap_or_default(), path)
            }
            UseTree::Rename(tree) => (tree.rename.to_string(), with(tree.ident.to_string())),
        };
        if local != "*" {
            self.mention(path.clone());
        }
        self.module.imports.push((local, path));
    }
}

impl<'ast> Visit<'ast> for Mentions<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_test_only(item_attributes(item)) || matches!(item, Item::Mod(_)) {
            return;
        }
        if let Some(name) = public_type(item) {
            self.module.public_types.push(name);
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if !is_test_only(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&[], &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.mention(path.segments.iter().map(|s| s.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        visit::visit_macro(self, call);
        self.tokens(call.tokens.clone());
    }
}

fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item other than a module declares.
fn item_name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// The name of a type, a trait or an alias that other modules can see.
fn public_type(item: &Item) -> Option<String> {
    let visibility = match item {
        Item::Enum(item) => &item.vis,
        Item::Struct(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Union(item) => &item.vis,
        _ => return None,
    };
    let is_private = matches!(visibility, syn::Visibility::Inherited);
    if is_private { None } else { item_name(item) }
}

/// Whether the attributes have `#[cfg(test)]`, or a compound condition that needs `test`.
fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else {
            return false;
        };
        let text = list.tokens.to_string();
        let has = |word: &str| crate::sources::has_word(&text, word);
        list.path.is_ident("cfg") && has("test") && !has("not") && !has("any")
    })
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else {
            return None;
        };
        let syn::Expr::Lit(literal) = &pair.value else {
            return None;
        };
        match &literal.lit {
            syn::Lit::Str(text) if pair.path.is_ident("path") => Some(text.value()),
            _ => None,
        }
    })
}

/// Every crate of the workspace, by the name of its directory.
pub fn workspace() -> &'static [(String, CrateModules)] {
    static READ: OnceLock<Vec<(String, CrateModules)>> = OnceLock::new();
    READ.get_or_init(read_workspace)
}

fn read_workspace() -> Vec<(String, CrateModules)> {
    let read_one = |name: String| {
        let read = |file: &str| read_if_there(&format!("crates/{name}/src/{file}"));
        let root = ["lib.rs", "main.rs"]
            .into_iter()
            .find(|root| read(root).is_some());
        let modules = CrateModules::read(root.expect("a crate has a root file"), &read);
        assert!(
            modules.modules.len() > 1,
            "{name}: only one module was found"
        );
        (name, modules)
    };
    crates().into_iter().map(read_one).collect()
}

#[test]
fn modules_form_no_cycle() {
    let mut found = Vec::new();
    for (name, modules) in workspace() {
        for depth in [Depth::Folders, Depth::Files] {
            for cycle in modules.cycles(depth) {
                let members: Vec<&str> = cycle.modules.iter().map(String::as_str).collect();
                found.push(format!(
                    "crates/{name}, {depth:?}: {}\n{}",
                    members.join(", "),
                    cycle.edges.join("\n")
                ));
            }
        }
    }
    crate::sources::none(found, "modules that use each other in a circle");
}

#[cfg(test)]
mod checks {
    use super::*;

    fn cycles_of(files: &[(&str, &str)], depth: Depth) -> Vec<Vec<String>> {
        let files: BTreeMap<&str, &str> = files.iter().copied().collect();
        let read = |name: &str| files.get(name).map(|text| (*text).to_owned());
        let modules = CrateModules::read("lib.rs", &read);
        let cycles = modules.cycles(depth).into_iter();
        cycles.map(|c| c.modules.into_iter().collect()).collect()
    }

    #[test]
    fn files_that_use_each_other_are_a_cycle() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; pub struct A(B); use crate::c::C;"),
            ("b.rs", "pub struct B; fn f() { super::a::f(); }"),
            ("c.rs", "pub struct C;"),
        ];
        let mut with_function = files;
        with_function[1].1 = "use crate::b::B; pub fn f() {}";
        assert_eq!(cycles_of(&with_function, Depth::Files), [["a", "b"]]);
        assert_eq!(cycles_of(&with_function, Depth::Folders), [["a", "b"]]);
        // There is no a::f in the first version, so nothing leads back.
        assert!(cycles_of(&files, Depth::Files).is_empty());
    }

    #[test]
    fn a_re_export_hides_no_cycle() {
        let files = [
            ("lib.rs", "mod folder; mod other;"),
            ("folder/mod.rs", "mod inner; pub use inner::Thing;"),
            ("folder/inner.rs", "pub struct Thing; use crate::other::go;"),
            (
                "other.rs",
                "use crate::folder; pub fn go(thing: &folder::Thing) {}",
            ),
        ];
        assert_eq!(cycles_of(&files, Depth::Files), [["folder/inner", "other"]]);
        assert_eq!(cycles_of(&files, Depth::Folders), [["folder", "other"]]);
    }

    #[test]
    fn a_glob_and_a_macro_hide_no_cycle() {
        let files = [
            ("lib.rs", "mod a; mod b; mod names { pub use crate::b::*; }"),
            (
                "a.rs",
                "use crate::names::*; pub const A: u8 = 1; fn f(b: B) {}",
            ),
            (
                "b.rs",
                "pub struct B; fn f() { assert_eq!(1, crate::a::A); }",
            ),
        ];
        assert_eq!(cycles_of(&files, Depth::Files), [["a", "b"]]);
    }

    #[test]
    fn folders_can_be_in_a_cycle_though_no_files_are() {
        let files = [
            ("lib.rs", "mod x; mod y;"),
            ("x/mod.rs", "pub mod one; pub mod two;"),
            ("x/one.rs", "use crate::y::three::T;"),
            ("x/two.rs", "pub struct S;"),
            ("y/mod.rs", "pub mod three; pub mod four;"),
            ("y/three.rs", "pub struct T;"),
            ("y/four.rs", "use crate::x::two::S;"),
        ];
        assert!(cycles_of(&files, Depth::Files).is_empty());
        assert_eq!(cycles_of(&files, Depth::Folders), [["x", "y"]]);
    }

    #[test]
    fn uses_of_a_parent_module_and_uses_in_tests_form_no_cycle() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            (
                "a/mod.rs",
                "mod child; pub struct A; fn f() { child::f(); }",
            ),
            ("a/child.rs", "use super::A; pub fn f() {}"),
            (
                "b.rs",
                "use crate::a::A; #[cfg(test)] mod tests { use crate::b; } pub fn f() {}",
            ),
        ];
        assert!(cycles_of(&files, Depth::Files).is_empty());
    }
}
