//! Names of things. Each is a type of its own, so that no two can be exchanged,
//! and the two that a trainer chooses never print what they hold: keys may
//! carry what is nobody else's business.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps a name; checking it is the caller's business.
            pub fn new(name: impl Into<Arc<str>>) -> Self {
                Self(name.into())
            }

            /// The name itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
    };
}

macro_rules! shown {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

macro_rules! redacted {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}(..)", stringify!($name))
            }
        }
    };
}

text_id!(
    /// A replica's stable name: 1 to 128 characters of `[A-Za-z0-9._:-]`.
    ReplicaId
);
shown!(ReplicaId);

text_id!(
    /// One start of an engine, minted by its sidecar.
    BootId
);
shown!(BootId);

text_id!(
    /// Whose request it is: from the credentials, never from the request's body.
    Tenant
);
shown!(Tenant);

impl Default for Tenant {
    fn default() -> Self {
        Self::new("default")
    }
}

text_id!(
    /// Names one generation: 1 to 128 printable ASCII characters.
    IdempotencyKey
);
redacted!(IdempotencyKey);

text_id!(
    /// Names one trajectory: 1 to 256 characters.
    AffinityKey
);
redacted!(AffinityKey);

/// Which start of a replica. Given by Berth, persisted, only growing for one
/// replica. 0 is never given.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A DP rank of one start of a replica: what a request is sent to.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Target {
    /// The replica.
    pub replica: ReplicaId,
    /// Its start.
    pub incarnation: Incarnation,
    /// The rank's number in Berth's routing.
    pub rank: u32,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}/{}", self.replica, self.incarnation, self.rank)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The id of one attempt at an engine: `b` and 32 hexadecimal digits. Always of
/// one length, because SGLang's abort takes every id that the given one is a
/// prefix of; never repeated.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineRequestId(Arc<str>);

impl EngineRequestId {
    /// A new one.
    pub fn mint() -> Self {
        Self(format!("b{}", uuid::Uuid::new_v4().simple()).into())
    }

    /// As it is sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for EngineRequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for EngineRequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_prints_what_it_holds() {
        let printed = format!(
            "{:?} {:?}",
            IdempotencyKey::new("canary"),
            AffinityKey::new("canary")
        );
        assert!(!printed.contains("canary"), "{printed}");
    }

    #[test]
    fn engine_ids_have_one_length_and_do_not_repeat() {
        let (a, b) = (EngineRequestId::mint(), EngineRequestId::mint());
        assert_eq!(a.as_str().len(), 33);
        assert_eq!(a.as_str().len(), b.as_str().len());
        assert_ne!(a, b);
    }
}
