//! The policies that can be compared. Each is a way to set up the routing core
//! that serves; none has code of its own here. One that the core learns is one
//! more line in [`POLICIES`].

use std::str::FromStr;

use crate::{call::RoutingPolicy, routing::RouterConfig};

/// A policy by its name.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// As it was asked for.
    pub name: String,
    /// In a few words.
    pub about: &'static str,
    /// What every request asks for.
    pub routing: RoutingPolicy,
    /// How the router is set up.
    pub router: RouterConfig,
}

/// One line of the list.
struct Known {
    name: &'static str,
    about: &'static str,
    routing: RoutingPolicy,
    /// Of keyed policies: balance against agreement.
    load_factor: f64,
}

const DEFAULT_LOAD_FACTOR: f64 = 1.0;

/// All of them, the default first.
const POLICIES: [Known; 6] = [
    Known {
        name: "affinity",
        about: "sticky, new keys to the least loaded rank, ties by hash",
        routing: RoutingPolicy::Affinity,
        load_factor: DEFAULT_LOAD_FACTOR,
    },
    Known {
        name: "bounded_hash",
        about: "sticky, consistent hashing with bounded loads (1.25)",
        routing: RoutingPolicy::Affinity,
        load_factor: 1.25,
    },
    Known {
        name: "hash",
        about: "sticky, plain consistent hashing",
        routing: RoutingPolicy::Affinity,
        load_factor: f64::INFINITY,
    },
    Known {
        name: "round_robin",
        about: "each request to the next rank",
        routing: RoutingPolicy::RoundRobin,
        load_factor: DEFAULT_LOAD_FACTOR,
    },
    Known {
        name: "random",
        about: "each request by a hash of its id",
        routing: RoutingPolicy::Random,
        load_factor: DEFAULT_LOAD_FACTOR,
    },
    Known {
        name: "least_loaded",
        about: "each request to the rank with the least in flight",
        routing: RoutingPolicy::LeastLoaded,
        load_factor: DEFAULT_LOAD_FACTOR,
    },
];

impl Policy {
    /// All that there are, the default first.
    pub fn all() -> Vec<Self> {
        POLICIES.iter().map(Self::of).collect()
    }

    fn of(known: &Known) -> Self {
        Self {
            name: known.name.to_owned(),
            about: known.about,
            routing: known.routing,
            router: RouterConfig {
                load_factor: known.load_factor,
                ..RouterConfig::default()
            },
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    /// By name. `bounded_hash:1.5` sets the bound on loads.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, factor) = match text.split_once(':') {
            Some((name, factor)) => (name, Some(factor)),
            None => (text, None),
        };
        let known = POLICIES.iter().find(|known| known.name == name);
        let known = known.ok_or_else(|| {
            let names: Vec<_> = POLICIES.iter().map(|known| known.name).collect();
            format!("there is no policy {name:?}, only {}", names.join(", "))
        })?;
        let mut policy = Self::of(known);
        if let Some(factor) = factor {
            if known.name != "bounded_hash" {
                return Err(format!("{name} takes no number"));
            }
            policy.router.load_factor = match factor.parse::<f64>() {
                Ok(factor) if factor >= 1.0 => factor,
                _ => return Err(format!("{factor:?} is no number of at least 1")),
            };
            text.clone_into(&mut policy.name);
            policy.about = "sticky, consistent hashing with bounded loads";
        }
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_name() {
        for policy in Policy::all() {
            assert_eq!(policy.name.parse::<Policy>().unwrap(), policy);
        }
        assert_eq!(Policy::all()[0].router, RouterConfig::default());
        let tighter: Policy = "bounded_hash:1.1".parse().unwrap();
        assert!((tighter.router.load_factor - 1.1).abs() < 1e-9);
        for wrong in ["", "best", "hash:2", "bounded_hash:0.5", "bounded_hash:nan"] {
            assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
        }
    }
}
