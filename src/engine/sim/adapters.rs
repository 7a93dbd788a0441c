//! The LoRA adapters of a simulated engine. Each load of one has a number of its
//! own, and KV is found only by requests for the very load that made it.

use std::collections::BTreeMap;

/// Adapters by name; unset: LoRA is not enabled.
#[derive(Debug, Default)]
pub(super) struct Adapters {
    enabled: bool,
    loaded: BTreeMap<String, Loaded>,
    loads: u64,
}

/// One load of an adapter.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    /// Where it was loaded from.
    pub(super) path: String,
    /// The number of the load.
    pub(super) load: u64,
}

impl Adapters {
    pub(super) fn new(first: Option<&[(String, String)]>) -> Self {
        let mut adapters = Self {
            enabled: first.is_some(),
            ..Self::default()
        };
        for (name, path) in first.unwrap_or_default() {
            let _ = adapters.load(name, path);
        }
        adapters
    }

    pub(super) fn enabled(&self) -> bool {
        self.enabled
    }

    /// In order of their names.
    pub(super) fn all(&self) -> impl Iterator<Item = (&String, &Loaded)> {
        self.loaded.iter()
    }

    /// Loads one. The words of a refusal are inferred.
    pub(super) fn load(&mut self, name: &str, path: &str) -> Result<(), String> {
        if !self.enabled {
            return Err("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.".into());
        }
        if self.loaded.contains_key(name) {
            return Err(format!("LoRA adapter {name} is already loaded."));
        }
        self.loads += 1;
        let loaded = Loaded {
            path: path.to_owned(),
            load: self.loads,
        };
        self.loaded.insert(name.to_owned(), loaded);
        Ok(())
    }

    /// Loads one, or another in the place of the one of that name.
    pub(super) fn load_in_place(&mut self, name: &str, path: &str) -> Result<(), String> {
        let _ = self.unload(name);
        self.load(name, path)
    }

    pub(super) fn is_loaded(&self, name: &str) -> bool {
        self.loaded.contains_key(name)
    }

    /// Unloads one.
    pub(super) fn unload(&mut self, name: &str) -> Result<(), String> {
        match self.loaded.remove(name) {
            Some(_) => Ok(()),
            None => Err(format!("LoRA adapter {name} is not loaded.")),
        }
    }

    /// The load that a request for `name` uses, or why there is none.
    pub(super) fn find(&self, name: &str) -> Result<u64, String> {
        if !self.enabled {
            return Err(format!(
                "LoRA adapter '{name}' was requested, but LoRA is not enabled. Please launch the \
                 server with --enable-lora flag and preload adapters using --lora-paths or \
                 /load_lora_adapter endpoint."
            ));
        }
        let names: Vec<&String> = self.loaded.keys().collect();
        self.loaded.get(name).map(|loaded| loaded.load).ok_or_else(|| {
            // Inferred.
            format!(
                "The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: \
                 {names:?}."
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_is_another_load() {
        let mut adapters = Adapters::new(Some(&[("a".to_owned(), "/a".to_owned())]));
        let first = adapters.find("a").unwrap();
        assert!(adapters.load("a", "/a2").is_err());
        adapters.unload("a").unwrap();
        assert!(adapters.find("a").unwrap_err().contains("not loaded: a"));
        adapters.load("a", "/a").unwrap();
        assert_ne!(adapters.find("a").unwrap(), first);
        let none = Adapters::new(None);
        assert!(none.find("a").unwrap_err().contains("not enabled"));
    }
}
