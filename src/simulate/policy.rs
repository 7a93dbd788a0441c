//! The policies that can be compared. Each is a way to set up the routing core
//! that serves; none has code of its own here. One that the core learns is one
//! more entry of the list below.

use std::str::FromStr;

use crate::{
    call::RoutingPolicy,
    routing::{KvAdmission, MoveConfig, RouterConfig},
};

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
    /// What stands behind the colon, of those that take a number, unless told; and
    /// the least that may.
    number: Option<(f64, f64)>,
    /// Sets the router up, with that number.
    configure: fn(&mut RouterConfig, f64),
}

/// All of them, the default first.
const KNOWN: [Known; 9] = [
    Known {
        name: "affinity",
        about: "sticky, new keys to the least loaded rank, ties by hash",
        routing: RoutingPolicy::Affinity,
        number: None,
        configure: |_, _| {},
    },
    Known {
        name: "bounded_hash",
        about: "sticky, consistent hashing with bounded loads",
        routing: RoutingPolicy::Affinity,
        number: Some((1.25, 1.0)),
        configure: |router, factor| router.load_factor = factor,
    },
    Known {
        name: "hash",
        about: "sticky, plain consistent hashing",
        routing: RoutingPolicy::Affinity,
        number: None,
        configure: |router, _| router.load_factor = f64::INFINITY,
    },
    Known {
        name: "kv_admission",
        about: "affinity, and keys wait while no rank has room for them",
        routing: RoutingPolicy::Affinity,
        number: Some((1.0, 0.01)),
        configure: |router, share| {
            router.kv_admission = Some(KvAdmission {
                share,
                ..KvAdmission::default()
            });
        },
    },
    Known {
        name: "moves",
        about: "affinity, and keys leave a rank whose queue costs more than their history",
        routing: RoutingPolicy::Affinity,
        number: Some((60.0, 1.0)),
        configure: |router, per_minute| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "saturates"
            )]
            let per_minute = per_minute as u32;
            router.moves = Some(MoveConfig {
                per_minute,
                ..MoveConfig::default()
            });
        },
    },
    Known {
        name: "prefix",
        about: "each request, as if it had no key, to the rank that saw most of its prompt",
        routing: RoutingPolicy::Prefix,
        number: None,
        configure: |_, _| {},
    },
    Known {
        name: "round_robin",
        about: "each request to the next rank",
        routing: RoutingPolicy::RoundRobin,
        number: None,
        configure: |_, _| {},
    },
    Known {
        name: "random",
        about: "each request by a hash of its id",
        routing: RoutingPolicy::Random,
        number: None,
        configure: |_, _| {},
    },
    Known {
        name: "least_loaded",
        about: "each request to the rank with the least in flight",
        routing: RoutingPolicy::LeastLoaded,
        number: None,
        configure: |_, _| {},
    },
];

impl Policy {
    /// All that there are, the default first.
    pub fn all() -> Vec<Self> {
        let plain = |known: &Known| Self::of(known, known.name, known.number.map(|n| n.0));
        KNOWN.iter().map(plain).collect()
    }

    fn of(known: &Known, name: &str, number: Option<f64>) -> Self {
        let mut router = RouterConfig::default();
        (known.configure)(&mut router, number.unwrap_or_default());
        Self {
            name: name.to_owned(),
            about: known.about,
            routing: known.routing,
            router,
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    /// By name. `bounded_hash:1.5` sets the bound on loads.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, number) = match text.split_once(':') {
            Some((name, number)) => (name, Some(number)),
            None => (text, None),
        };
        let known = KNOWN.iter().find(|known| known.name == name);
        let known = known.ok_or_else(|| {
            let names: Vec<_> = KNOWN.iter().map(|known| known.name).collect();
            format!("there is no policy {name:?}, only {}", names.join(", "))
        })?;
        let number = match (known.number, number) {
            (default, None) => default.map(|(number, _)| number),
            (None, Some(_)) => return Err(format!("{name} takes no number")),
            (Some((_, least)), Some(number)) => match number.parse::<f64>() {
                Ok(number) if number >= least => Some(number),
                _ => return Err(format!("{number:?} is no number of at least {least}")),
            },
        };
        Ok(Self::of(known, text, number))
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
        for wrong in [
            "",
            "best",
            "hash:2",
            "bounded_hash:0.5",
            "bounded_hash:nan",
            "kv_admission:0",
        ] {
            assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
        }
    }
}
