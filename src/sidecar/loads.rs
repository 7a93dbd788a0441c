//! Tells the loads of an adapter apart. No engine does: it lists a name and where
//! that was loaded from. An adapter that was seen, was seen gone, and is back, has
//! been loaded anew, whatever it is called. One that was unloaded and loaded again
//! between two looks cannot be told from one that stayed.

use std::collections::{HashMap, HashSet};

use crate::{
    engine::facts::{AdapterFact, shortened},
    proto::Adapter,
};

/// Adapters remembered that are gone.
const MOST_GONE: usize = 4096;
/// Of a load id, in bytes at most: the limit of registration.
const MAX_ID: usize = 256;

/// The loads that were seen.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// By name and root.
    seen: HashMap<(String, String), Load>,
    /// The count of one that is not known: above all counts that were forgotten.
    first: u64,
}

#[derive(Debug)]
struct Load {
    /// Loads before this one.
    count: u64,
    here: bool,
}

impl Loads {
    /// All adapters that are there now.
    pub(super) fn see(&mut self, adapters: &[AdapterFact]) {
        let name = |fact: &AdapterFact| (fact.name.clone(), fact.root.clone());
        let here: HashSet<_> = adapters.iter().map(name).collect();
        for (known, load) in &mut self.seen {
            load.here &= here.contains(known);
        }
        for fact in adapters {
            let count = self.first;
            let load = self
                .seen
                .entry(name(fact))
                .or_insert(Load { count, here: true });
            if !load.here {
                load.count += 1;
                load.here = true;
            }
        }
        if self.seen.len() > adapters.len() + MOST_GONE {
            let gone = self.seen.values().filter(|load| !load.here);
            self.first = gone.map(|load| load.count + 1).fold(self.first, u64::max);
            self.seen.retain(|_, load| load.here);
        }
    }

    /// What the engine lists, it has in memory. The load is named by where it came
    /// from, and by how often that was seen to come.
    pub(super) fn adapter(&self, fact: &AdapterFact) -> Adapter {
        let known = self.seen.get(&(fact.name.clone(), fact.root.clone()));
        let load_id = match known.map_or(self.first, |load| load.count) {
            0 => fact.root.clone(),
            count => format!("#{count} {}", fact.root),
        };
        Adapter {
            name: fact.name.clone(),
            load_id: within(load_id),
            resident: true,
        }
    }
}

/// A root may be as long as an id by itself.
fn within(mut id: String) -> String {
    while id.len() > MAX_ID {
        let most = id
            .chars()
            .count()
            .saturating_sub((id.len() - MAX_ID).div_ceil(4));
        id = shortened(id, most);
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact(name: &str, root: &str) -> AdapterFact {
        AdapterFact {
            name: name.to_owned(),
            root: root.to_owned(),
        }
    }

    fn id(loads: &Loads, fact: &AdapterFact) -> String {
        loads.adapter(fact).load_id
    }

    #[test]
    fn one_that_was_gone_and_is_back_is_another_load() {
        let mut loads = Loads::default();
        let (a, b) = (fact("a", "/a"), fact("b", "/b"));
        loads.see(&[a.clone(), b.clone()]);
        let first = (id(&loads, &a), id(&loads, &b));
        assert_eq!(first, ("/a".to_owned(), "/b".to_owned()));
        loads.see(&[a.clone(), b.clone()]);
        loads.see(std::slice::from_ref(&b));
        loads.see(&[]);
        loads.see(&[a.clone(), b.clone()]);
        let second = (id(&loads, &a), id(&loads, &b));
        assert!(second.0 != first.0 && second.1 != first.1, "{second:?}");
        loads.see(std::slice::from_ref(&b));
        loads.see(&[a.clone(), b.clone()]);
        assert!(id(&loads, &a) != second.0 && id(&loads, &b) == second.1);
    }

    #[test]
    fn a_version_that_returns_is_another_load_of_it() {
        let mut loads = Loads::default();
        let (one, two) = (fact("a", "/a/1"), fact("a", "/a/2"));
        let mut ids = Vec::new();
        for version in [&one, &two, &one, &two] {
            loads.see(std::slice::from_ref(version));
            ids.push(id(&loads, version));
        }
        assert_eq!(ids[..2], ["/a/1", "/a/2"]);
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 4, "{ids:?}");
    }

    #[test]
    fn what_is_forgotten_does_not_come_back_as_it_was() {
        let mut loads = Loads::default();
        let a = fact("a", "/a");
        loads.see(std::slice::from_ref(&a));
        let first = id(&loads, &a);
        for i in 0..MOST_GONE + 10 {
            loads.see(&[fact(&format!("n{i}"), "/n")]);
        }
        assert!(loads.seen.len() < MOST_GONE);
        loads.see(std::slice::from_ref(&a));
        assert_ne!(id(&loads, &a), first);
    }

    #[test]
    fn an_id_keeps_the_limit_of_registration() {
        let mut loads = Loads::default();
        for root in ["r".repeat(256), "\u{00fc}".repeat(256)] {
            let a = fact("a", &root);
            for _ in 0..2 {
                loads.see(std::slice::from_ref(&a));
                loads.see(&[]);
            }
            loads.see(std::slice::from_ref(&a));
            let id = id(&loads, &a);
            assert!(id.len() <= MAX_ID && id.starts_with("#2 "), "{id}");
        }
    }
}
