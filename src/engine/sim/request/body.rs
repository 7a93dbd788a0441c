//! The body's first gate: JSON, and the shape of `input_ids`.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

#[derive(Debug, Default)]
pub(super) enum Ids {
    #[default]
    Absent,
    One(Vec<i64>),
    Many(Vec<Vec<i64>>),
    /// Its type, as Python names it.
    Wrong(&'static str),
}

/// The body with `input_ids` read straight into numbers: a prompt of 100,000
/// ids must not become 100,000 JSON values first.
#[derive(Default)]
pub(super) struct Body {
    pub(super) ids: Ids,
    pub(super) rest: serde_json::Map<String, Value>,
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Body;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
                let mut body = Body::default();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "input_ids" {
                        body.ids = map.next_value()?;
                    } else {
                        body.rest.insert(key, map.next_value()?);
                    }
                }
                Ok(body)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Ids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of token ids, or of such lists")
            }

            fn visit_unit<E>(self) -> Result<Ids, E> {
                Ok(Ids::Absent)
            }

            fn visit_str<E>(self, _: &str) -> Result<Ids, E> {
                Ok(Ids::Wrong("str"))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Ids, E> {
                Ok(Ids::Wrong("bool"))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Ids, E> {
                Ok(Ids::Wrong("int"))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Ids, E> {
                Ok(Ids::Wrong("int"))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Ids, E> {
                Ok(Ids::Wrong("float"))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ids, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Ids::Wrong("dict"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                #[derive(Deserialize)]
                #[serde(untagged)]
                enum First {
                    Id(i64),
                    List(Vec<i64>),
                }
                match seq.next_element::<First>()? {
                    None => Ok(Ids::One(Vec::new())),
                    Some(First::Id(first)) => {
                        let mut ids = vec![first];
                        while let Some(id) = seq.next_element()? {
                            ids.push(id);
                        }
                        Ok(Ids::One(ids))
                    }
                    Some(First::List(first)) => {
                        let mut lists = vec![first];
                        while let Some(list) = seq.next_element()? {
                            lists.push(list);
                        }
                        Ok(Ids::Many(lists))
                    }
                }
            }
        }
        deserializer.deserialize_any(Shape)
    }
}
